"""Float8 linears by emulation: really rounded, close to float32, refused where they cannot run, the same checkpoints."""

import importlib.util
import json
import logging
import subprocess
import sys
from unittest.mock import patch

import pytest
import torch
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

from tests.configurations import problems
from tests.distributed.cases import make_trainer, remove, shared_folder, train_all
from tests.end_to_end.runs import checkpoint_tensors
from tests.launcher import ROOT, run_on_ranks
from torchtitan.conditions import Classes
from torchtitan.config.job import load_config
from torchtitan.distributed.activation_checkpoint import checkpoint_blocks
from torchtitan.distributed.config import ActivationCheckpointConfig
from torchtitan.distributed.parallelize import local
from torchtitan.models import MODELS, float8
from torchtitan.models.float8 import Float8Config, Float8Error, check_convertible, convert_to_float8
from torchtitan.run import REFUSED, run

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
ON = ("--float8.enable", "true", "--float8.emulate", "true")

FIND_SPEC = importlib.util.find_spec
needs_torchao = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="could not import 'torchao'")


def debug_model(device="cpu"):
    """A model none of whose blocks is the identity, as it is at initialisation."""
    with torch.device(device):
        model = MODELS["dit"].build(MODELS["dit"].flavors["debug"], (1, 8, 8), Classes(10))
    if device == "cpu":
        torch.manual_seed(0)
        model.init_weights()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def output_and_gradients(model, **autocast):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4, 1, 8, 8, generator=generator)
    with torch.autocast("cpu", **{"enabled": False, **autocast}):
        y = model(x, torch.linspace(0, 999, 4), torch.arange(4))
    y.square().mean().backward()
    named = {name.replace("_checkpoint_wrapped_module.", ""): p.grad for name, p in model.named_parameters()}
    return y.detach(), named


def distance(found, wanted):
    return float((found - wanted).norm() / wanted.norm())


def stacked(gradients):
    return torch.cat([gradient.flatten() for gradient in gradients.values()])


@needs_torchao
@pytest.mark.parametrize("recipe", RECIPES)
def test_emulation_rounds_forward_and_backward_but_not_far(recipe):
    wanted, wanted_gradients = output_and_gradients(debug_model())
    model = debug_model()
    convert_to_float8(model, Float8Config(enable=True, emulate=True, recipe=recipe))
    found, gradients = output_and_gradients(model)
    assert 1e-4 < distance(found, wanted) < 1e-1
    assert 1e-4 < distance(stacked(gradients), stacked(wanted_gradients)) < 1e-1
    # A linear's own input gradient and weight gradient are rounded, or kept exact, as the recipe says.
    x, dy = torch.randn(32, 64), torch.randn(32, 192)
    converted, plain = (source.get_submodule("layers.0.attention.qkv") for source in (model, debug_model()))
    errors = {}
    for name, linear in (("found", converted), ("wanted", plain)):
        linear.zero_grad()
        linear(x).backward(dy)
        errors[name] = linear.weight.grad
    exact = distance(errors["found"], errors["wanted"])
    assert exact < 1e-6 if recipe == "rowwise_with_gw_hp" else 1e-3 < exact < 1e-1
    # Autocast on the CPU computes in bfloat16 around float8.
    model.zero_grad()
    found, gradients = output_and_gradients(model, dtype=torch.bfloat16, enabled=True)
    assert distance(found, wanted) < 0.1 and distance(stacked(gradients), stacked(wanted_gradients)) < 0.1
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model.get_submodule("layers.0.mlp.out")(torch.randn(16, 128)).dtype == torch.bfloat16


@needs_torchao
def test_only_wide_linears_over_tokens_are_converted_and_keep_their_parameters():
    model = debug_model()
    names, flops = dict(model.named_parameters()), model.flops_per_image((1, 8, 8))
    blocks = {f"layers.{i}.{name}" for i in range(3) for name in ("attention.qkv", "attention.out", "mlp.gate_up", "mlp.out")}
    assert set(convert_to_float8(model, Float8Config(enable=True, emulate=True))) == blocks
    found = dict(model.named_parameters())
    assert list(found) == list(names) and all(found[name] is names[name] for name in names)
    assert model.flops_per_image((1, 8, 8)) == flops

    filtered = Float8Config(enable=True, emulate=True, filter_fqns=["layers.0", "mlp"])
    assert set(convert_to_float8(debug_model(), filtered)) == {name for name in blocks if "0" not in name and "mlp" not in name}
    none = Float8Config(enable=True, emulate=True, filter_fqns=["attention", "mlp"])
    with pytest.raises(Float8Error, match="no linear over tokens is left"):
        check_convertible(debug_model("meta"), none, 16)


def test_tokens_of_a_batch_must_suit_the_products(monkeypatch):
    model, config = debug_model("meta"), Float8Config(enable=True)  # 16 tokens an image
    check_convertible(model, config, 3)
    monkeypatch.setattr(model, "tokens_per_image", lambda shape: 4)
    check_convertible(model, config, 4)
    with pytest.raises(Float8Error, match="training.local_batch_size: 3 images are 12 tokens"):
        check_convertible(model, config, 3)
    check_convertible(model, Float8Config(enable=True, emulate=True), 3)


@needs_torchao
def test_recomputation_and_one_graph_per_block_change_nothing():
    config = Float8Config(enable=True, emulate=True)
    plain, wrapped = debug_model(), debug_model()
    for model in (plain, wrapped):
        convert_to_float8(model, config)
    wanted, wanted_gradients = output_and_gradients(plain)
    checkpoint_blocks(wrapped, list(wrapped.blocks()), ActivationCheckpointConfig(mode="selective"))
    for block in wrapped.blocks():
        block.compile(fullgraph=True, backend="aot_eager")
    found, gradients = output_and_gradients(wrapped)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)
    for name, gradient in wanted_gradients.items():
        torch.testing.assert_close(gradients[name], gradient, atol=1e-5, rtol=1e-3)


def curve(trainer, *more):
    """Losses of the logged steps, and what else was logged under the names in `more`."""
    points = map(json.loads, (trainer.state.folder.path / "metrics.jsonl").read_text().splitlines())
    return [[point[tag] for tag in ("loss_metrics/global_avg_loss", *more)] for point in points]


@needs_torchao
def test_training_follows_float32_and_a_run_changes_over_and_back(tmp_path):
    def trained(name, steps, *overrides):
        trainer = make_trainer(
            str(tmp_path), name, steps=8, replicas=1, shards=1, accumulation=1,
            overrides=("--checkpoint.enable", "true", "--checkpoint.interval", "4", *same_rate, *overrides),
        )
        trainer.config.training.steps = steps
        assert trainer.train() == 0
        trainer.close()
        return trainer

    same_rate = ("--lr_scheduler.warmup_steps", "0", "--lr_scheduler.decay_type", "constant")  # whatever the steps are
    change = ("--job.allow_config_change", "true")
    wanted = [loss for (loss,) in curve(trained("float32", 8))]
    trained("float8", 4, *ON)
    trained("float8", 6, *change)
    found = trained("float8", 8, *change, *ON)
    losses = [loss for (loss,) in curve(found)]
    assert len(losses) == 8 and losses != wanted
    assert losses == pytest.approx(wanted, rel=0.03)
    shapes = [
        {name: tensor.shape for name, tensor in checkpoint_tensors(tmp_path / name / "checkpoint" / "step-00000008").items()}
        for name in ("float32", "float8")
    ]
    assert shapes[0] == shapes[1]


@needs_torchao
def test_sharded_float8_has_the_losses_of_one_process():
    # Scales of rows, and weights' gradients in high precision: none depends on what else a rank holds.
    overrides = (*ON, "--float8.recipe", "rowwise_with_gw_hp")
    case = {"steps": 5, "replicas": 1, "accumulation": 1, "overrides": overrides}
    two = run_on_ranks("tests.distributed.cases:train_all", 2, {"cases": {"f8": {**case, "shards": 2}}})[0]["f8"]
    one = train_all({"f8": {**case, "shards": 1}})["f8"]
    for (loss, norm), (other_loss, other_norm) in zip(two, one, strict=True):
        assert loss == pytest.approx(other_loss, rel=1e-5) and norm == pytest.approx(other_norm, rel=1e-5)


GATHERED = (*ON, "--float8.enable_fsdp_float8_all_gather", "true")


def gathered_in_float8(ranks):
    """Losses and norms of a sharded run with weights gathered in float8, resumed in the middle; dtypes of what is gathered, and
    classes of the converted linears' shards.
    """
    folder, dtypes, found = shared_folder(), set(), {}
    original = _fsdp_param_group.foreach_all_gather

    def spied(parameters, *args, **kwargs):
        for parameter in parameters:
            dtypes.update(str(part.dtype) for part in parameter.all_gather_inputs)
        return original(parameters, *args, **kwargs)

    for name, settings in {"gathered": GATHERED, "cast after": ON}.items():
        for steps in (2, 4):
            overrides = ("--checkpoint.enable", "true", *settings)
            trainer = make_trainer(folder, name, steps=8, replicas=1, shards=ranks, accumulation=1, overrides=overrides)
            trainer.config.training.steps = steps
            with patch.object(_fsdp_param_group, "foreach_all_gather", spied if name == "gathered" else original):
                assert trainer.train() == 0
            trainer.close()
        found[name] = curve(trainer, "grad_norm")
        average = trainer.state.ema.tracks["ema"]["layers.0.mlp.out.weight"]
        found[name] += [[local(average).norm().item()]]
        weights = [trainer.state.model.get_submodule(f"layers.{i}.mlp.out").weight for i in range(3)]
        found[f"{name}, shards"] = [type(weight.to_local()).__name__ for weight in weights]
    remove(folder)
    return found | {"dtypes": sorted(dtypes)}


@needs_torchao
def test_weights_gathered_in_float8_are_those_cast_after_the_gather():
    found = run_on_ranks("tests.unit.test_float8:gathered_in_float8", 2, {"ranks": 2})[0]
    assert found["dtypes"] == ["torch.float32", "torch.float8_e4m3fn"]
    assert found["gathered, shards"] == ["WeightWithDynamicFloat8CastTensor"] * 3
    assert found["cast after, shards"] == ["Tensor"] * 3
    assert len(found["gathered"]) == 5
    # One scale of the whole weight either way: the same bits are multiplied.
    for values, wanted in zip(found["gathered"], found["cast after"], strict=True):
        assert values == pytest.approx(wanted, rel=1e-5)


def pretend_torchao(monkeypatch, spec):
    """torchao is installed, or not; other packages are as they are."""
    monkeypatch.setattr(float8.importlib.util, "find_spec", lambda name: spec if name == "torchao" else FIND_SPEC(name))


def test_what_cannot_run_is_refused_in_a_line_that_says_what_to_do(monkeypatch):
    pretend_torchao(monkeypatch, object())
    enable = ("--float8.enable", "true")
    assert problems(arguments=enable) == [
        "command line: --float8.enable: the CPU has no float8 matrix products (set float8.emulate to true, or"
        " float8.enable to false)"
    ]
    (taps,) = problems(arguments=[*ON, "--gns.enable", "true"])
    assert "float8.enable: the single-pass noise estimate replaces the same linears" in taps
    (unused,) = problems(arguments=["--float8.recipe", "rowwise"])
    assert "has no effect when float8.enable = false" in unused
    load_config(list(ON), 1)
    (unsharded,) = problems(arguments=GATHERED)
    assert "enable_fsdp_float8_all_gather: has no effect without shards" in unsharded
    (rows,) = problems(arguments=[*GATHERED, "--float8.recipe", "rowwise"])
    assert "enable_fsdp_float8_all_gather: has no effect when float8.recipe = rowwise" in rows

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    (old,) = problems(arguments=enable)
    assert "NVIDIA A100 (compute capability 8.0) has no float8 matrix products" in old and "emulate" in old
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    (coarse,) = problems(arguments=enable)
    assert "set training.mixed_precision_param to bfloat16" in coarse
    load_config([*enable, "--training.mixed_precision_param", "bfloat16"], 1)

    pretend_torchao(monkeypatch, None)
    (missing,) = problems(arguments=ON)
    assert "-m pip install 'torchao>=0.18,<0.19'" in missing


def test_a_model_without_anything_to_convert_is_refused_before_its_folder_is_made(tmp_path, capsys, monkeypatch):
    pretend_torchao(monkeypatch, object())
    argv = [*ON, "--float8.filter_fqns", '["layers"]', "--job.dump_folder", str(tmp_path), "--job.name", "none"]
    assert run(load_config(argv, 1)) == REFUSED
    assert capsys.readouterr().err.startswith("float8.enable: no linear over tokens is left to convert")
    assert not list(tmp_path.iterdir())
    logging.shutdown()


@needs_torchao
def test_importing_torchao_says_nothing_but_errors():
    program = (
        "import logging; logging.basicConfig(); from torchtitan.extras import quiet_torchao\n"
        "with quiet_torchao(): import torchao.float8, torchao.optim, torchao.quantization\n"
        "logging.getLogger('torchao').warning('later')"
    )
    process = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True, timeout=120)
    assert process.stderr == "WARNING:torchao:later\n"
