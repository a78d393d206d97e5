"""What is computed again in backward, what is kept instead, and that gradients do not notice."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch._functorch.config as functorch_config
from torch.utils._python_dispatch import TorchDispatchMode

from tests.configurations import problems
from torchtitan.conditions import Classes
from torchtitan.distributed import parallelize as parallelize_module
from torchtitan.distributed.activation_checkpoint import checkpoint_blocks
from torchtitan.distributed.compile import compile_blocks
from torchtitan.distributed.config import ActivationCheckpointConfig, CompileConfig, ParallelismConfig
from torchtitan.distributed.mesh import Layout
from torchtitan.distributed.parallelize import named_parameters, parallelize
from torchtitan.models import MODELS
from torchtitan.models.base import DiffusionModel
from torchtitan.models.dit.config import FLAVORS

BLOCKS = 3
PRODUCTS = 5  # of a block: modulation, qkv, attention's output, two of the MLP
SELECTIVE = {"mode": "selective"}
FULL = {"mode": "full"}


def debug_model(num_layers: int = BLOCKS) -> DiffusionModel:
    torch.manual_seed(0)
    model = MODELS["dit"].build(replace(FLAVORS["debug"], num_layers=num_layers), (1, 8, 8), Classes(10))
    model.init_weights()
    with torch.no_grad():
        for parameter in model.parameters():  # gates start at zero
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def checkpointed(settings: dict) -> DiffusionModel:
    model = debug_model()
    checkpoint_blocks(model, model.blocks(), ActivationCheckpointConfig(**settings))
    return model


def loss_of(model: DiffusionModel) -> torch.Tensor:
    x = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    return model(x, torch.linspace(0, 999, 4), torch.arange(4)).square().mean()


def gradients(model: DiffusionModel) -> dict[str, torch.Tensor]:
    loss_of(model).backward()
    return {name: parameter.grad for name, parameter in named_parameters(model).items()}


class CountOperations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def products_and_attentions_in_backward(model: DiffusionModel) -> tuple[int, int]:
    loss = loss_of(model)
    with CountOperations() as seen:
        loss.backward()
    counts = seen.counts
    return counts["mm"] + counts["addmm"], counts["_scaled_dot_product_flash_attention_for_cpu"]


@pytest.mark.parametrize(
    "settings, products, attentions",
    [
        ({"mode": "none"}, 0, 0),
        (SELECTIVE, 0, 0),
        (FULL, BLOCKS * PRODUCTS, BLOCKS),
        (FULL | {"every": 2}, 2 * PRODUCTS, 2),
        (FULL | {"every": 3}, PRODUCTS, 1),
    ],
    ids=str,
)
def test_each_mode_computes_again_what_it_says_and_gives_the_same_gradients(settings, products, attentions):
    plain = products_and_attentions_in_backward(debug_model())
    found = products_and_attentions_in_backward(checkpointed(settings))
    assert (found[0] - plain[0], found[1] - plain[1]) == (products, attentions)
    wanted, got = gradients(debug_model()), gradients(checkpointed(settings))
    assert list(got) == list(wanted)
    assert all(torch.equal(got[name], gradient) for name, gradient in wanted.items())


def test_elementwise_operations_are_computed_again_where_products_are_kept():
    counts = {}
    for mode in ("none", "selective"):
        loss = loss_of(checkpointed({"mode": mode}))
        with CountOperations() as seen:
            loss.backward()
        counts[mode] = seen.counts["silu"]
    assert counts == {"none": 0, "selective": BLOCKS}


def compiled(settings: dict, memory_budget: float) -> DiffusionModel:
    torch.compiler.reset()
    model = checkpointed(settings)
    compile_blocks(model.blocks(), memory_budget, backend="aot_eager")
    return model


def bytes_kept(model: DiffusionModel) -> int:
    """Of the tensors between forward and backward, parameters aside."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    seen = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss_of(model).backward()
    return sum(size for place, size in seen.items() if place not in own)


def test_a_memory_budget_lies_between_full_and_none_under_the_compiler():
    wanted = gradients(debug_model())
    full, kept = bytes_kept(checkpointed(FULL)), {}
    for budget in (1.0, 0.5, 0.0):
        model = compiled({"mode": "memory_budget"}, budget)
        kept[budget] = bytes_kept(model)
        assert functorch_config.activation_memory_budget == 1.0  # everybody else's is left alone
        for name, parameter in named_parameters(model).items():
            torch.testing.assert_close(parameter.grad, wanted[name], rtol=1e-5, atol=1e-6)
    assert kept[0.0] <= 1.1 * full < 0.3 * kept[1.0]
    assert 1.5 * kept[0.0] < kept[0.5] < 0.75 * kept[1.0]


def test_parallelize_hands_the_budget_to_the_compiler_and_refuses_one_without_it(monkeypatch):
    given = []
    monkeypatch.setattr(parallelize_module, "compile_blocks", lambda blocks, budget, **_: given.append((len(blocks), budget)))
    monkeypatch.setattr(parallelize_module, "compile_model", lambda model, budget, **_: given.append((model, budget)))
    layout = Layout(ParallelismConfig(data_parallel_replicate_degree=1, data_parallel_shard_degree=1))
    budgeted = ActivationCheckpointConfig(mode="memory_budget", memory_budget=0.3)
    parallelize(debug_model(), layout, checkpointing=budgeted, compiling=CompileConfig(enable=True))
    parallelize(debug_model(), layout, compiling=CompileConfig(enable=True))
    model = debug_model()
    parallelize(model, layout, checkpointing=budgeted, compiling=CompileConfig(enable=True, scope="model"))
    assert given == [(BLOCKS, 0.3), (BLOCKS, 1.0), (model, 0.3)]
    with pytest.raises(ValueError, match="compiled"):
        parallelize(debug_model(), layout, checkpointing=budgeted)


@pytest.mark.parametrize(
    "settings, line",
    [
        ("every = 2", "every: has no effect when activation_checkpoint.mode = none; remove it or set"),
        ('mode = "full"\nevery = 4', "every: 4 is more than the model's 3 blocks (set at most 3: the first alone)"),
        ('mode = "memory_budget"', "mode: memory_budget is the compiler's work (set compile.enable to true"),
    ],
)
def test_what_would_be_ignored_or_cannot_be_is_refused(settings, line, in_empty_folder):
    (found,) = problems(f'[model]\nflavor = "debug"\nnum_layers = 3\n[activation_checkpoint]\n{settings}\n')
    assert f"activation_checkpoint.{line}" in found
