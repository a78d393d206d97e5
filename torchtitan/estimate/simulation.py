"""Simulation of one training step without memory: the real model, sharding and objective on fake tensors."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchtitan.autoencoders.base import Autoencoder
from torchtitan.conditions import Texts, placeholder
from torchtitan.config.job import JobConfig
from torchtitan.data import DatasetInfo, dataset_info
from torchtitan.diffusion.objective import Draw, Microbatch, Objective
from torchtitan.diffusion.objectives import attach, build_objective
from torchtitan.distributed.activation_checkpoint import checkpoint_blocks
from torchtitan.distributed.mesh import Layout
from torchtitan.distributed.parallelize import accumulate_locally, local, parallelize
from torchtitan.distributed.precision import compute_context
from torchtitan.estimate.cuda_autocast import cuda_autocast
from torchtitan.estimate.cuda_kernels import cuda_kernels
from torchtitan.estimate.encoding import estimated_info, online_encoder
from torchtitan.estimate.live_storages import ACCUMULATED, ACTIVATIONS, GRADIENTS, PARAMETERS, LiveStorages
from torchtitan.models import MODELS, build_model
from torchtitan.models.adapters.frozen_network import freeze_and_adapt
from torchtitan.models.base import DiffusionModel
from torchtitan.training.config import UPDATE_RULES, OptimizerConfig
from torchtitan.training.data_loading import microbatches_per_step
from torchtitan.training.muon import orthogonalise
from torchtitan.training.optimizer import QUANTISED_BLOCK, matrices_of, update_rule
from torchtitan.training.schedules import largest_growth

if TYPE_CHECKING:
    from torchtitan.alignment.plan import Plan

Window = tuple[int, str, int]

_QUANTILE_TABLE = 256  # values that 8 bits stand for, float32, a table for each of the two moments


@dataclass(frozen=True)
class SimulatedStep:
    """Simulated step: bytes of rank 0, which holds most: it has a row of every unevenly sharded parameter.

    Attributes:
        held: "parameters" (with the model's tables), "gradients", "optimizer" and "ema", each when complete.
        windows: (microbatch, phase, block) -> category -> bytes at the window's peak, optimizer and EMA not counted.
            Phases are "encode" (block -1), "forward" (block -1: before the first), "backward" (from the gradient of that block's
            output on; block `depth`: from the loss) and "optimizer".
    """

    held: Counter
    windows: dict[Window, Counter]


def simulate_step(config: JobConfig, world_size: int, on_gpu: bool | None = None) -> SimulatedStep:
    """Simulate one eager step as rank 0 of `world_size` processes on fake tensors; seconds for a few blocks.

    With bfloat16 compute, dtypes are those of CUDA's autocast.

    Args:
        on_gpu: whether the run is on GPUs, where RMS norms keep less than on a CPU; None: whether this machine has one.

    Raises:
        RuntimeError: this process belongs to a process group already.
    """
    on_gpu = torch.cuda.is_available() if on_gpu is None else on_gpu
    info = estimated_info(config)
    objective = build_objective(config.objective, config.debug.seed)
    plan, encoder = _plan_of_alignment(config, info), online_encoder(config)
    with _fake_process_group(world_size):
        layout = Layout(config.parallelism, torch.device("cpu"))
        kernels = cuda_kernels() if on_gpu else nullcontext()
        with cuda_autocast(), FakeTensorMode(allow_non_fake_inputs=True), LiveStorages() as live, kernels:
            model = build_model(config.model, info.image_shape, info.condition_kind)
            freeze_and_adapt(model, config.lora, MODELS[config.model.name].adapter_sets).train()
            attach(objective, model, info.trained_entries)
            return _Step(model, layout, config, info, objective, live, plan, encoder).simulate()


def _plan_of_alignment(config: JobConfig, info: DatasetInfo) -> "Plan | None":
    """Plan of the run's alignment; of a network of fewer blocks than its places, at the last one."""
    if config.alignment.teacher == "none":
        return None
    from torchtitan.alignment.plan import Plan

    with torch.device("meta"):
        model = build_model(config.model, info.image_shape, info.condition_kind)
    places = {key: min(getattr(config.alignment, key), len(model.probe_points())) for key in ("block", "teacher_block")}
    return Plan(replace(config.alignment, **places), model, info)


class _Step:
    def __init__(
        self, model: DiffusionModel, layout: Layout, config: JobConfig, info: DatasetInfo, objective: Objective,
        live: LiveStorages, plan: "Plan | None", encoder: Autoencoder | None,
    ) -> None:  # fmt: skip
        self.model, self.layout, self.config, self.info, self.objective, self.live = model, layout, config, info, objective, live
        self.microbatch, self.plan, self.encoder = 0, plan, encoder

    def simulate(self) -> SimulatedStep:
        live, config = self.live, self.config
        self._parallelize()
        self.parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        live.hold([*self.model.parameters(), *self.model.buffers()], PARAMETERS)
        ema = len(config.ema.tracks) * sum(_bytes(local(p.detach())) for p in self.parameters)
        if self.plan is not None:
            self._align(self.plan)
        if self.encoder is not None:
            self.encoder.move(torch.device("cpu"))
            live.hold(self.encoder.parameters(), PARAMETERS)
        held = Counter({PARAMETERS: live.now()[PARAMETERS], "optimizer": self._optimizer_bytes(), "ema": ema})
        self._take_gradients()
        self._mark_blocks()
        training = config.training
        microbatches = microbatches_per_step(
            training.global_batch_size, training.local_batch_size, self.layout.data_ranks
        )
        simulated = min(microbatches * largest_growth(config), 2)  # a third is like the second
        for self.microbatch in range(simulated):
            self._forward_backward(last=self.microbatch == simulated - 1)
            if self.layout.sharded and not self.last:  # what is left after a backward are its gradients, not reduced
                live.move(ACTIVATIONS, ACCUMULATED)
                live.hold([] if self.encoder is None else [self.pixels], ACTIVATIONS)
        live.hold([p.grad for p in self.parameters if p.grad is not None], GRADIENTS)
        live.open_window((0, "optimizer", 0))
        held[GRADIENTS] = live.now()[GRADIENTS]
        if config.optimizer.rule.orthogonalises:
            self._orthogonalise_largest()
        live.windows.pop(None)
        return SimulatedStep(held, live.windows)

    def _align(self, plan: "Plan") -> None:
        """Take the projector and the teacher among what is held; a teacher's forward keeps nothing."""
        from torchtitan.alignment.tap import Tap

        self.tap, self.projector = Tap(self.model, plan.student.point), plan.projector()
        self.teacher = torch.empty(plan.encoder_bytes, dtype=torch.uint8)
        self.parameters += self.projector.parameters()
        self.live.hold([*self.projector.parameters(), self.teacher], PARAMETERS)

    def _parallelize(self) -> None:
        checkpointing, training = self.config.activation_checkpoint, self.config.training
        if self.layout.sharded:
            parallelize(
                self.model, self.layout, checkpointing=checkpointing, sharding=self.config.parallelism,
                param_dtype=training.mixed_precision_param, reduce_dtype=training.mixed_precision_reduce,
            )  # fmt: skip
        else:
            if self.layout.context is not None:
                self.model.split_tokens(self.layout.context)
            checkpoint_blocks(self.model, list(self.model.blocks()), checkpointing)

    def _take_gradients(self) -> None:
        """Count gradients as such; with copies of the model, move them into buckets.

        DistributedDataParallel cannot run without memory. With gradient_as_bucket_view it holds room for every
        gradient from the start; in the last microbatch each gradient, once complete, is copied there and let go.
        """
        if self.layout.sharded:
            return
        buckets = {}
        if self.layout.world_size > 1:
            buckets = {p: torch.empty_like(p, requires_grad=False) for p in self.parameters}
            self.live.hold(buckets.values(), GRADIENTS)

        def take(parameter: nn.Parameter) -> None:
            gradient = cast(Tensor, parameter.grad)
            if buckets and self.last:
                parameter.grad = buckets[parameter].copy_(gradient)
            else:
                self.live.hold([gradient], GRADIENTS)

        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(take)

    def _mark_blocks(self) -> None:
        blocks = list(self.model.blocks())

        def mark(phase: str, block: int) -> None:
            self.live.open_window((self.microbatch, phase, block))

        def mark_backward(block: int, output: Tensor | tuple[Tensor, ...]) -> None:
            for tensor in output if isinstance(output, tuple) else (output,):
                if tensor.requires_grad:  # not of a call that an objective makes without gradients
                    tensor.register_hook(lambda _: mark("backward", block))

        for number, block in enumerate(blocks):
            block.register_forward_pre_hook(lambda *_, number=number: mark("forward", number))
            block.register_forward_hook(lambda _, inputs, output, number=number: mark_backward(number, output))

    def _forward_backward(self, last: bool) -> None:
        """Forward and backward of one microbatch as in the trainer, on values that do not exist."""
        self.last = last
        config, live = self.config, self.live
        samples = torch.arange(config.training.local_batch_size)
        if self.encoder is not None:
            live.open_window((self.microbatch, "encode", -1))
            self.pixels = torch.empty(len(samples), *dataset_info(config.data).image_shape)  # which a teacher may read
            self.encoder.encode(self.pixels)
        live.open_window((self.microbatch, "forward", -1))
        self.model.draw_dropout(config.debug.seed, samples, steps_left=1)  # the last step may have more tokens than others
        batch = self.info.placeholder(len(samples), self.model.image_shape) | {"samples": samples}
        t, noise, importance = torch.empty(len(samples)), torch.empty_like(batch["images"]), torch.empty(len(samples))
        index = torch.empty(len(samples), dtype=torch.int64) if self.objective.path.discrete else None
        kept = self.objective.kept(torch.empty(len(samples)), 0.0)
        dual = self.plan is not None and config.alignment.dual_share
        times = torch.empty(len(samples), 1, *self.plan.student.grid) if self.plan and dual else None
        kind = self.model.condition_kind
        condition = placeholder(kind.entries, len(samples)) if isinstance(kind, Texts) else kind.of(batch)  # no text is encoded
        microbatch = Microbatch(batch["images"], condition, batch, kept)
        with accumulate_locally(self.model, last=last):
            precision = compute_context(config.training.mixed_precision_param, self.layout.device, self.layout.sharded)
            with precision, nullcontext() if self.plan is None else self.tap.taken(grad=True):
                terms = self.objective.loss(self.model, microbatch, Draw(t, noise, importance, index, token_times=times))
            if self.plan is not None:
                terms = replace(terms, beside=self._alignment_loss(self.plan))
            live.open_window((self.microbatch, "backward", len(self.model.blocks())))
            terms.minimised.mean().backward()

    def _alignment_loss(self, plan: "Plan") -> Tensor:
        from torchtitan.alignment.loss import cosine_loss

        tokens = self.tap.tokens()
        with compute_context(self.config.training.mixed_precision_param, self.layout.device, sharded=False):
            projected = self.projector(tokens)
        return cosine_loss(projected, torch.empty(*tokens.shape[:2], plan.channels))

    def _optimizer_bytes(self) -> int:
        matrices = set(matrices_of(self.model.blocks(), self.config.optimizer))
        return sum(_state_bytes(p, self.config.optimizer, p in matrices) for p in self.parameters)

    def _orthogonalise_largest(self) -> None:
        """Orthogonalise the largest matrix: the one optimizer step that takes more than a few rows besides its state.

        Ranks that share the matrices each have one whole, and their shards of those of the others.
        """
        matrices = [p for p in matrices_of(self.model.blocks(), self.config.optimizer) if p.requires_grad]
        largest = max(matrices, key=lambda p: p.numel())
        ahead = [local(largest.detach()).clone() for _ in matrices[: self.layout.shards]]
        whole = torch.empty(largest.shape)
        self.live.hold([*ahead, whole], ACTIVATIONS)
        orthogonalise(whole)


def _state_bytes(parameter: nn.Parameter, config: OptimizerConfig, in_matrices: bool) -> int:
    part = local(parameter.detach())
    rule = UPDATE_RULES[update_rule(parameter, config, in_matrices)]
    if rule.quantised:  # codes and, a block, one scale
        return rule.averages * (part.numel() + 4 * part.numel() // QUANTISED_BLOCK + 4 * _QUANTILE_TABLE)
    return rule.averages * 4 * part.numel() + 4 * rule.is_adams  # with the number of steps


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


@contextmanager
def _fake_process_group(world_size: int) -> Iterator[None]:
    if dist.is_initialized():
        raise RuntimeError("the estimate simulates ranks and cannot run inside a process group")
    if world_size == 1:
        yield
        return
    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
