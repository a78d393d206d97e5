"""Parameter groups, update rules, schedules and clipping against float64 and closed forms; resumes bit for bit."""

import dataclasses
import importlib.util
import math
import re
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.configurations import problems
from tests.distributed.cases import make_trainer
from tests.refusals import one_line
from torchtitan.conditions import Classes
from torchtitan.config import checks as config_checks
from torchtitan.config.job import load_config
from torchtitan.extras import install
from torchtitan.models.dit.config import FLAVORS
from torchtitan.models.dit.model import DiT
from torchtitan.state.resume import checkpointed_state
from torchtitan.training.config import (
    UPDATE_RULES,
    LRSchedulerConfig,
    OptimizerConfig,
    ParameterGroupConfig,
    UpdateRule,
)
from torchtitan.training.muon import SCALES, orthogonalise
from torchtitan.training.optimizer import OptimizerError, build_optimizer, matrices_of, optimizer_tensors, set_lr
from torchtitan.training.schedules import lr_factor


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3))


def gradients(model: nn.Module, seed: int = 2) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


# --- schedule and clipping


def test_inverse_root_schedule_has_the_published_rates():
    # In epochs, as published: warm-up over 200, the peak of 0.02 up to 400.
    config = LRSchedulerConfig(warmup_steps=200, decay_type="inverse_sqrt", reference_steps=400)
    wanted = {0: 1e-4, 99: 0.01, 199: 0.02, 400: 0.02, 800: 0.0141421, 1600: 0.01, 1999: 0.00894651}
    for done, rate in wanted.items():
        assert 0.02 * lr_factor(config, done + 1, 2000) == pytest.approx(rate, rel=5e-6)
    assert lr_factor(config, 1601, 5000) == lr_factor(config, 1601, 2000)
    long = LRSchedulerConfig(warmup_steps=100, decay_type="inverse_sqrt", reference_steps=25)
    assert lr_factor(long, 51, 1000) == pytest.approx(0.51 / math.sqrt(2))
    assert lr_factor(LRSchedulerConfig(decay_type="inverse_sqrt", reference_steps=9), 1, 100) == 1


def test_groups_scale_rate_and_decay_and_the_first_that_fits_counts():
    model = network()
    groups = [
        ParameterGroupConfig(pattern=r"^0\.weight$", lr_scale=0.5),
        ParameterGroupConfig(pattern=r"^0\.", lr_scale=3.0, weight_decay=0.2),
        ParameterGroupConfig(pattern="2", weight_decay=0.0),
    ]
    config = OptimizerConfig(lr=0.1, weight_decay=0.3, param_groups=groups)
    optimizer = build_optimizer(dict(model.named_parameters()), config)
    wanted = {  # name -> (multiple of the rate, decay)
        "0.weight": (0.5, 0.3), "0.bias": (3.0, 0.2), "1.weight": (1, 0), "1.bias": (1, 0), "2.weight": (1, 0),
        "2.bias": (1, 0),
    }
    before = {name: p.detach().double() for name, p in model.named_parameters()}
    gradients(model)
    set_lr(optimizer, 0.02)
    optimizer.step()
    for name, parameter in model.named_parameters():
        scale, decay = wanted[name]
        gradient = parameter.grad.double()
        moved = before[name] * (1 - 0.02 * scale * decay) - 0.02 * scale * gradient / (gradient.abs() + 1e-8)
        torch.testing.assert_close(parameter.detach().double(), moved, rtol=1e-5, atol=1e-7)


def test_a_pattern_without_parameters_is_refused_with_the_closest_names():
    parameters = dict(network().named_parameters())

    def refused(*patterns: str) -> str:
        groups = [ParameterGroupConfig(pattern=pattern) for pattern in patterns]
        return one_line(OptimizerError, build_optimizer, parameters, OptimizerConfig(param_groups=groups))

    line = refused("0", "2.wieght")
    assert line.startswith("optimizer.param_groups[1].pattern: '2.wieght' fits no parameter (closest: 2.weight, ")
    line = refused("0", "0.bias")
    assert line == "optimizer.param_groups[1].pattern: '0.bias' fits only parameters of earlier groups"


def test_groups_without_a_rate_are_refused(monkeypatch):
    bare = UpdateRule(0, build=lambda groups, config: torch.optim.Optimizer(groups, {}))
    monkeypatch.setitem(UPDATE_RULES, "Bare", bare)  # as a plugin adds one
    line = one_line(OptimizerError, build_optimizer, dict(network().named_parameters()), OptimizerConfig(name="Bare"))
    assert line == "optimizer.name: Bare: its parameter groups have no lr (give its defaults one, which is set)"


def test_eps_is_refused_with_a_rule_that_has_none(monkeypatch):
    monkeypatch.setitem(UPDATE_RULES, "SGD", UpdateRule(1))  # as a plugin adds one
    monkeypatch.setitem(UPDATE_RULES, "RMSprop", UpdateRule(1, eps=True))
    load_config(["--optimizer.name=SGD", "--optimizer.eps=1e-8"], 1)  # as in the record of a run
    for name in ("AdamW", "Muon", "RMSprop"):
        load_config([f"--optimizer.name={name}", "--optimizer.eps=1e-6"], 1)
    line = "command line: --optimizer.eps: has no effect with optimizer.name = SGD, which has none (remove it)"
    assert problems(arguments=["--optimizer.name=SGD", "--optimizer.eps=1e-6"]) == [line]


@pytest.mark.parametrize(("arguments", "line"), [
    (['--optimizer.param_groups=[{"lr_scale": 2}]'],
     "command line: --optimizer.param_groups[0].pattern: is missing (say which parameter names the group is for)"),
    (['--optimizer.param_groups=[{"pattern": "a("}]'],
     "command line: --optimizer.param_groups[0].pattern: 'a(' is no regular expression: "
     "missing ), unterminated subpattern at position 1"),
    (["--optimizer.name=AdamW8bit"],
     "command line: --optimizer.name: AdamW8bit needs the package torchao, which is not installed "
     f"({install('lowbit')}, or set AdamW)"),
])
def test_impossible_optimizers_are_refused(arguments, line, monkeypatch):
    find = importlib.util.find_spec

    def hidden(name):
        return None if name == "torchao" else find(name)

    monkeypatch.setattr(config_checks.importlib.util, "find_spec", hidden)
    monkeypatch.setattr(config_checks, "_no_compiler", lambda: False)
    assert problems(arguments=arguments) == [line]


# --- Muon


def polynomial(values: torch.Tensor) -> torch.Tensor:
    """What five iterations make of singular values."""
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return values


def orthogonalised(matrix: torch.Tensor) -> torch.Tensor:
    """The same by a singular value decomposition in float64."""
    u, s, vh = torch.linalg.svd(matrix.double(), full_matrices=False)
    return u @ torch.diag(polynomial(s / s.square().sum().sqrt())) @ vh


@pytest.mark.parametrize("shape", [(6, 6), (5, 17), (40, 8), (1, 9)])
def test_orthogonalising_keeps_the_singular_vectors_and_evens_the_values(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(3)) * 1e-3
    found = orthogonalise(matrix)
    torch.testing.assert_close(found.double(), orthogonalised(matrix), rtol=0, atol=3e-5)
    values = torch.linalg.svdvals(matrix.double())
    large = values / values.square().sum().sqrt() > 0.01
    assert large.any() and ((torch.linalg.svdvals(found)[: large.sum()] - 0.95).abs() < 0.3).all()


def test_orthogonalising_nothing_is_nothing():
    assert torch.equal(orthogonalise(torch.zeros(3, 4)), torch.zeros(3, 4))


@pytest.mark.parametrize(("scale", "size"), [("rms", 0.2 * math.sqrt(7)), ("fan", math.sqrt(7 / 5))])
def test_muon_steps_equal_their_formula_and_the_rest_is_adamw(scale, size):
    model, twin = network(), network()
    config = OptimizerConfig(name="Muon", lr=0.01, weight_decay=0.1, muon_scale=scale)
    optimizer = build_optimizer(dict(model.named_parameters()), config, blocks=[model[0], model[1]])
    adamw = build_optimizer(dict(twin.named_parameters()), OptimizerConfig(lr=0.01, weight_decay=0.1))
    weight, average = model[0].weight.detach().double(), torch.zeros(7, 5, dtype=torch.float64)
    for step in (1, 2, 3):
        for each, rule in ((model, optimizer), (twin, adamw)):
            gradients(each, step)
            rule.step()
        gradient = model[0].weight.grad.double()
        average = 0.95 * average + 0.05 * gradient
        direction = orthogonalised(0.95 * average + 0.05 * gradient)
        weight = (1 - 0.01 * 0.1) * weight - 0.01 * size * direction
        torch.testing.assert_close(model[0].weight.detach().double(), weight, rtol=0, atol=3e-7)
    for (name, found), wanted in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(found, wanted) == (name != "0.weight")


@pytest.mark.parametrize(
    ("shape", "rms", "fan"), [((3072, 768), 11.085, 2.0), ((768, 3072), 11.085, 0.5), ((2304, 768), 9.6, 1.732)]
)
def test_sizes_of_muon_s_updates_are_the_published_ones(shape, rms, fan):
    assert [SCALES["rms"](shape), SCALES["fan"](shape)] == pytest.approx([rms, fan], abs=5e-4)


@pytest.mark.parametrize("keys", [{}, {"embedding_per_block": True}])
def test_with_the_scale_fan_adaln_and_embeddings_are_adamw_s(keys):
    config = dataclasses.replace(FLAVORS["debug"], **keys)
    with torch.device("meta"):
        model = DiT(config, (1, 8, 8), Classes(10))
    names = {parameter: name for name, parameter in model.named_parameters()}
    found = {}
    for scale in ("rms", "fan"):
        matrices = matrices_of(model.blocks(), OptimizerConfig(name="Muon", muon_scale=scale))
        found[scale] = {names[parameter].split(".", 2)[2] for parameter in matrices}
    assert found["fan"] == {f"{layer}.weight" for layer in ("attention.qkv", "attention.out", "mlp.gate_up", "mlp.out")}
    assert "modulation.weight" in found["rms"] - found["fan"]
    assert any("embed" in name for name in found["rms"] - found["fan"]) == bool(keys)


# --- AdamW


def test_adamw_is_torch_s_bit_for_bit_through_skips_and_missing_gradients_in_few_operations():
    models = [network(), network()]
    config = OptimizerConfig(lr=0.01, beta2=0.99, eps=1e-3, weight_decay=0.1)
    ours = build_optimizer(dict(models[0].named_parameters()), config)
    decayed, others = ([p for p in models[1].parameters() if (p.ndim > 1) == matrix] for matrix in (True, False))
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    theirs = torch.optim.AdamW(groups, lr=0.01, betas=(config.beta1, config.beta2), eps=config.eps, fused=True)
    for step in range(7):
        for model in models:
            gradients(model, step)
            if step == 4:
                model[0].bias.grad = None
        skip = torch.tensor(step in (0, 3))  # the first step makes the states, though it is skipped
        theirs.found_inf = skip.to(torch.float32)
        theirs.step()
        with Operations() as found:
            ours.step(skip)
        if step in (2, 5):  # skip as a number; then, of each group, one kernel and the count of steps up and down
            assert found.names == ["_to_copy"] + 2 * ["add_", "_fused_adamw_", "sub_"]
    state = optimizer_tensors(ours, dict(models[0].named_parameters()))
    for (name, parameter), twin in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert torch.equal(parameter, twin)
        for key in ("exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(state[f"{name}.{key}"], theirs.state[twin][key])
        assert state[f"{name}.step"] == (4 if name == "0.bias" else 5)


class Operations(TorchDispatchMode):
    """Names of torch's operations, views left out."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket.__name__ != "detach":
            self.names.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


# --- every optimizer in a run


def steps(trainer, last: int) -> None:
    while trainer.state.step < last:
        trainer.state.step += 1
        trainer.train_step()


def test_a_resumed_run_with_eight_bit_state_goes_on_bit_for_bit(tmp_path, monkeypatch):
    pytest.importorskip("torchao")
    # torchao compiles a step for each shape; by inductor in the next test.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    overrides = (
        "--checkpoint.enable=true", "--model.dim=32", "--optimizer.name=AdamW8bit", "--optimizer.weight_decay=0.1",
    )  # fmt: skip
    options = {"steps": 10, "replicas": 1, "shards": 1, "accumulation": 1, "overrides": overrides}
    straight = make_trainer(str(tmp_path), "run", **options)
    steps(straight, 3)
    state = straight.state
    state.checkpointer.save(3, state.tensors(), checkpointed_state(state, straight.reports.state_dict()))
    steps(straight, 5)
    straight.close()

    resumed = make_trainer(str(tmp_path), "run", **options)
    assert resumed.state.step == 3
    steps(resumed, 5)
    wanted, found = straight.state.tensors(), resumed.state.tensors()
    assert wanted.keys() == found.keys()
    assert [key for key in wanted if not torch.equal(wanted[key], found[key])] == []
    endings = {key.rsplit(".", 1)[1] for key in found if key.startswith("optimizer.")}
    assert endings >= {"codes", "scale"}
    resumed.close()


def test_eight_bit_state_stays_near_that_of_adamw():
    pytest.importorskip("torchao")
    models = {name: nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 3)) for name in ("AdamW", "AdamW8bit")}
    models["AdamW8bit"].load_state_dict(models["AdamW"].state_dict())
    for name, model in models.items():
        optimizer = build_optimizer(dict(model.named_parameters()), OptimizerConfig(name=name, lr=1e-3))
        with torch.compiler.set_stance("force_eager"):  # the resumed run above runs the compiled update
            for step in range(5):
                gradients(model, step)
                optimizer.step()
        state = optimizer_tensors(optimizer, dict(model.named_parameters()))
        assert ("0.weight.exp_avg.codes" in state) == (name == "AdamW8bit") and "1.weight.exp_avg" in state
    moved = models["AdamW"][0].weight - models["AdamW8bit"][0].weight
    assert 0 < moved.abs().max() < 1e-3
    assert torch.equal(models["AdamW"][1].weight, models["AdamW8bit"][1].weight)


@pytest.mark.parametrize("number", range(4))
def test_examples_of_the_documentation_load(number, tmp_path):
    text = (Path(__file__).resolve().parents[2] / "docs" / "objectives.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```toml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    examples = [each for each in blocks if "[objective]" not in each]
    assert len(examples) == 4
    (tmp_path / "run.toml").write_text("[data]\nname = 'synthetic'\n" + examples[number])
    config = load_config(["--job.config_file", str(tmp_path / "run.toml")], 1)
    found = [
        len(config.optimizer.param_groups), config.lr_scheduler.warmup_images, len(config.ema.tracks),
        len(config.validation.timesteps),
    ]  # fmt: skip
    assert found[number] == [2, 10_000_000, 3, 8][number]
