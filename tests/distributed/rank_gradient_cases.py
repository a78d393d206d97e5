"""What the ranks of test_rank_gradients run; see tests.launcher."""

import copy
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.distributed.cases import compiler
from torchtitan.conditions import Classes
from torchtitan.distributed.config import ActivationCheckpointConfig, CompileConfig, ParallelismConfig
from torchtitan.distributed.mesh import Layout
from torchtitan.distributed.parallelize import (
    accumulate_locally,
    clip_gradients,
    gradient_norm,
    local,
    named_parameters,
    parallelize,
)
from torchtitan.distributed.precision import compute_context
from torchtitan.gns.ranks import RankGradients, SetAside, square_norm
from torchtitan.models import MODELS
from torchtitan.models.base import DiffusionModel
from torchtitan.models.dit.config import FLAVORS

LOCAL_BATCH, STEPS = 3, 2


@dataclass(kw_only=True)
class Case:
    replicas: int
    shards: int
    accumulation: int = 1
    checkpoint: str = "none"
    compiled: bool = False
    scope: str = "blocks"
    backend: str = "inductor"
    param_dtype: str = "float32"
    reduce_dtype: str = "float32"


def measure_all(cases: dict[str, dict]) -> dict[str, dict]:
    return {name: _measure(Case(**case)) for name, case in cases.items()}


def _measure(case: Case) -> dict:
    """Norms as measured and by brute force in one process, and how the gradient with the hook differs from without.

    After the first step DDP arranges its buckets anew.
    """
    layout = Layout(ParallelismConfig(
        data_parallel_replicate_degree=case.replicas, data_parallel_shard_degree=case.shards
    ))
    model = _model()
    plain, measured = _Run(case, layout, model), _Run(case, layout, model)
    rank_gradients = RankGradients(measured.module, layout)
    names = ("measured", "by_hand", "by_hand_float32", "reduced", "reduced_by_hand", "same_bits")
    found = {name: [] for name in names}
    for step in range(STEPS):
        plain.step(step)
        measured.step(step)
        found["same_bits"].append(all(map(torch.equal, plain.gradients(), measured.gradients())))
        found["reduced"].append(square_norm(measured.parameters, layout).item())
        # What is clipped and forgotten has been measured before.
        clip_gradients(measured.parameters, gradient_norm(measured.parameters, layout), 1e-3)
        found["measured"].append(rank_gradients.pop_square_norm().item())
        assert rank_gradients.pop_square_norm().item() == 0.0
        own = by_hand(case, layout, model, step)
        found["by_hand"].append(_squares(own))
        in_float32 = replace(case, param_dtype="float32")
        exact = own if case == in_float32 else by_hand(in_float32, layout, model, step)
        found["by_hand_float32"].append(_squares(exact))
        found["reduced_by_hand"].append(_squares(_mean_over_ranks(own)))
    if case.accumulation > 1:
        found["set_aside"] = _set_aside(case, layout, model, plain, measured, rank_gradients)
    return found


def set_aside_alone() -> dict:
    """The same as `set_aside` below, in a single process, where nothing is reduced."""
    case = Case(replicas=1, shards=1, accumulation=3)
    layout = Layout(ParallelismConfig(data_parallel_replicate_degree=1, data_parallel_shard_degree=1))
    model = _model()
    plain, alone = _Run(case, layout, model), _Run(case, layout, model)
    return _set_aside(case, layout, model, plain, alone, None)


def _set_aside(
    case: Case,
    layout: Layout,
    model: DiffusionModel,
    plain: "_Run",
    measured: "_Run",
    rank_gradients: RankGradients | None,
) -> dict:
    """Every microbatch reduced by itself: the norms of each, and how far their sum is from the accumulated gradient."""
    found = {"measured": [], "by_hand": [], "differences": []}
    aside = SetAside()
    for step in range(2):
        plain.step(step)
        measured.zero_grad()
        for number in range(case.accumulation):
            measured.backward(step, number, reduce=True)
            own = rank_gradients.pop_square_norm() if rank_gradients else square_norm(measured.parameters, layout)
            found["measured"].append(own.item())
            found["by_hand"].append(_squares(by_hand(case, layout, model, step, only=number)))
            aside.add(measured.parameters)
            assert all(parameter.grad is None for parameter in measured.parameters)
        aside.restore(measured.parameters)
        wanted, gradients = plain.gradients(), measured.gradients()
        difference = sum((a - b).double().square().sum() for a, b in zip(gradients, wanted, strict=True))
        total = sum(b.double().square().sum() for b in wanted)
        found["differences"].append((difference / total).sqrt().item())
    return found


class _Run:
    def __init__(self, case: Case, layout: Layout, model: nn.Module) -> None:
        self.case, self.layout = case, layout
        model = copy.deepcopy(model)
        with compiler(case.backend):
            self.module = parallelize(
                model, layout, checkpointing=ActivationCheckpointConfig(mode=case.checkpoint),
                compiling=CompileConfig(enable=case.compiled, scope=case.scope),
                param_dtype=case.param_dtype, reduce_dtype=case.reduce_dtype,
            )  # fmt: skip
        self.parameters = list(named_parameters(model).values())

    def step(self, step: int) -> None:
        self.zero_grad()
        for number in range(self.case.accumulation):
            self.backward(step, number, reduce=number == self.case.accumulation - 1)

    def backward(self, step: int, number: int, *, reduce: bool) -> None:
        with accumulate_locally(self.module, last=reduce):
            with compute_context(self.case.param_dtype, self.layout.device, self.layout.sharded):
                loss = _loss(self.module, _images(self.layout, step, number))
            (loss / self.case.accumulation).backward()

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def gradients(self) -> list[Tensor]:
        return [local(parameter.grad).clone() for parameter in self.parameters]


def by_hand(case: Case, layout: Layout, model: nn.Module, step: int, only: int | None = None) -> list[Tensor]:
    """Gradient of this rank's samples by a plain backward of the whole model; of one microbatch, if asked.

    In bfloat16 with the same roundings: autocast where DDP has it, weights in bfloat16 where FSDP casts them.
    """
    total = [torch.zeros_like(parameter) for parameter in model.parameters()]
    for number in range(case.accumulation) if only is None else [only]:
        whole = copy.deepcopy(model)
        if layout.sharded:
            whole = whole.to(getattr(torch, case.param_dtype))
            _restore_buffers(whole, model)
        with compute_context(case.param_dtype, layout.device, layout.sharded):
            loss = _loss(whole, _images(layout, step, number))
        (loss / case.accumulation).backward()
        for sum_, parameter in zip(total, whole.parameters(), strict=True):
            sum_ += parameter.grad
    return total


def _restore_buffers(model: nn.Module, source: nn.Module) -> None:
    for (name, _), (_, buffer) in zip(list(model.named_buffers()), source.named_buffers(), strict=True):
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, buffer)


def _model() -> DiffusionModel:
    torch.manual_seed(0)
    # The 11 rows of the class table divide by no number of ranks, so that FSDP pads them.
    model = MODELS["dit"].build(replace(FLAVORS["debug"], num_layers=2), (1, 8, 8), Classes(10))
    model.init_weights()
    with torch.no_grad():
        # Not the zeros that a DiT starts from, behind which nothing has a gradient.
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    return model.train()


def _images(layout: Layout, step: int, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 100 * number + layout.rank)
    return torch.randn(LOCAL_BATCH, 1, 8, 8, generator=generator)


def _loss(model: nn.Module, images: Tensor) -> Tensor:
    t = torch.sigmoid(images.mean((1, 2, 3)) * 4)
    output = model(images, t, torch.arange(len(images)))
    return (output.float() - 2 * images).square().flatten(1).mean(1).mean()


def _squares(gradients: list[Tensor]) -> float:
    return sum(gradient.double().square().sum() for gradient in gradients).item()


def _mean_over_ranks(gradients: list[Tensor]) -> list[Tensor]:
    total = torch.cat([gradient.flatten().double() for gradient in gradients])
    dist.all_reduce(total)
    return [total / dist.get_world_size()]
