"""What is computed again in backward, what is kept instead, and that gradients do not notice."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch._functorch.config as functorch_config
from torch.utils._python_dispatch import TorchDispatchMode

from torchtitan.conditions import Classes
from torchtitan.config.job import ConfigError, load_config
from torchtitan.distributed import parallelize as parallelize_module
from torchtitan.distributed.activation_checkpoint import checkpoint_blocks
from torchtitan.distributed.compile import compile_blocks
from torchtitan.distributed.config import ActivationCheckpointConfig, CompileConfig, ParallelismConfig
from torchtitan.distributed.mesh import Layout
from torchtitan.distributed.parallelize import named_parameters, parallelize
from torchtitan.estimate.live_storages import ACTIVATIONS
from torchtitan.estimate.simulation import simulate_step
from torchtitan.experiments.grid import read_sweep
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


def test_less_is_kept_the_more_is_computed_again():
    def kept(*words: str) -> int:
        config = load_config(["--model.flavor", "debug", "--model.num_layers", "4", *words], 1)
        return simulate_step(config, 1).windows[0, "backward", 4][ACTIVATIONS]

    mode = "--activation_checkpoint.mode"
    none, selective, full = kept(), kept(mode, "selective"), kept(mode, "full")
    assert none > 1.2 * selective and selective > 1.2 * full
    half = kept(mode, "full", "--activation_checkpoint.every", "2")
    assert half == pytest.approx((none + full) / 2, rel=1e-3)


def compiled(settings: dict, memory_budget: float = 1.0) -> DiffusionModel:
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
    none, full = bytes_kept(compiled({"mode": "none"})), bytes_kept(compiled(FULL))
    kept = {}
    for budget in (1.0, 0.5, 0.0):
        model = compiled({"mode": "memory_budget"}, budget)
        kept[budget] = bytes_kept(model)
        assert functorch_config.activation_memory_budget == 1.0  # everybody else's is left alone
        for name, parameter in named_parameters(model).items():
            torch.testing.assert_close(parameter.grad, wanted[name], rtol=1e-5, atol=1e-6)
    assert kept[1.0] == none
    assert kept[0.0] <= 1.1 * full < 0.3 * none
    assert 1.5 * kept[0.0] < kept[0.5] < 0.75 * none


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


def test_a_model_without_blocks_cannot_recompute():
    with pytest.raises(ValueError, match="Linear has no blocks"):
        checkpoint_blocks(torch.nn.Linear(2, 2), [], ActivationCheckpointConfig(mode="full"))


@pytest.mark.parametrize(
    "settings, line",
    [
        ("every = 2", "every: has no effect when activation_checkpoint.mode = none; remove it or set"),
        ('mode = "full"\nevery = 0', "every: must be at least 1, is 0"),
        ('mode = "full"\nevery = 4', "every: 4 is more than the model's 3 blocks (set at most 3: the first alone)"),
        ('mode = "selective"\nmemory_budget = 0.5', "memory_budget: has no effect when activation_checkpoint.mode"),
        ('mode = "memory_budget"', "mode: memory_budget is the compiler's work (set compile.enable to true"),
        ('mode = "memory_budget"\nmemory_budget = 1.5\n[compile]\nenable = true', "memory_budget: must be at least 0"),
        ('mode = "memory_budget"\nevery = 2\n[compile]\nenable = true', "every: has no effect when"),
    ],
)
def test_what_would_be_ignored_or_cannot_be_is_refused(settings, line, tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(f'[model]\nflavor = "debug"\nnum_layers = 3\n[activation_checkpoint]\n{settings}\n')
    with pytest.raises(ConfigError) as caught:
        load_config(["--job.config_file", str(path)], 1)
    problems = caught.value.problems
    assert len(problems) == 1 and f"activation_checkpoint.{line}" in problems[0], problems


def test_a_torch_without_memory_budget_is_told(monkeypatch):
    monkeypatch.setattr("torchtitan.distributed.config.functorch_config", object())
    with pytest.raises(ConfigError) as caught:
        load_config(["--activation_checkpoint.mode", "memory_budget", "--compile.enable", "true"], 1)
    assert "has no memory budget" in caught.value.problems[0]


def test_memory_budget_is_an_axis_of_a_sweep(tmp_path):
    path = tmp_path / "sweep.toml"
    path.write_text(
        '[fixed]\n"compile.enable" = true\n[axes]\n'
        '"activation_checkpoint.mode" = ["none", "memory_budget"]\n"training.local_batch_size" = [16]\n'
    )
    found = []
    for cell in read_sweep(path).cells:
        words = [f"--{key}={str(value).lower()}" for key, value in cell.values.items()]
        config = load_config(words, 1).activation_checkpoint
        found.append((cell.id, config.mode, config.memory_budget))
    assert found == [("ac=none_batch=16", "none", 0.5), ("ac=memory-budget_batch=16", "memory_budget", 0.5)]
