"""Maximal update parametrisation: initial weights, rates and decays by role; activations that change alike at every width."""

import math

import pytest
import torch

from torchtitan.conditions import Classes
from torchtitan.config.job import load_config
from torchtitan.errors import ConfigError
from torchtitan.models.dit.config import DiTConfig
from torchtitan.models.dit.conversion import layout_problems
from torchtitan.models.dit.model import DiT, attend
from torchtitan.training.config import OptimizerConfig
from torchtitan.training.optimizer import build_optimizer

SHAPE, BASE = (3, 8, 8), 32


def network(dim: int, **more) -> DiT:
    torch.manual_seed(0)
    sizes = {"dim": dim, "num_layers": 2, "num_heads": dim // 16, "patch_size": 2, "mlp_hidden_dim": 4 * dim}
    model = DiT(DiTConfig(**(sizes | more)), SHAPE, Classes(3))
    model.init_weights()
    return model


def test_initial_deviations_are_the_bases_by_role():
    base, wide = network(BASE), network(8 * BASE, mup_base_dim=BASE)
    found = {name: module.weight.std().item() for name, module in wide.named_modules() if isinstance(module, torch.nn.Linear)}
    for name, module in base.named_modules():
        if not isinstance(module, torch.nn.Linear) or not module.weight.any():
            continue
        inputs = name == "patch_embed" or name == "time_embed.hidden"
        wanted = module.weight.std().item() / (1.0 if inputs else math.sqrt(8))
        assert found[name] == pytest.approx(wanted, rel=0.08), name  # of 384 draws at least: 4 % each
    assert wide.label_embed.weight.std().item() == pytest.approx(0.02, rel=0.1)  # 1,024 draws: 2.2 % each standard error


@pytest.mark.parametrize("rule, scale, power", [("AdamW", "rms", 1.0), ("Muon", "rms", 0.5), ("Muon", "fan", 0.0)])
def test_rates_fall_and_decays_rise_by_role(rule, scale, power):
    model = network(4 * BASE, mup_base_dim=BASE)
    config = OptimizerConfig(name=rule, muon_scale=scale, lr=1e-2, weight_decay=0.1)
    optimizer = build_optimizer(dict(model.named_parameters()), config, model.blocks(), fan_in_ratios=model.fan_in_ratios())
    settings = {p: (float(group["lr"]), group["weight_decay"]) for group in optimizer.param_groups for p in group["params"]}
    adams, muons = 4.0**-1, 4.0**-power
    factors = {
        model.patch_embed.weight: 1.0, model.time_embed.hidden.weight: 1.0, model.label_embed.weight: 1.0,
        model.time_embed.out.weight: adams, model.output.linear.weight: adams, model.output.modulation.weight: adams,
        model.layers[0].attention.qkv.weight: muons, model.layers[1].mlp.out.weight: muons,
        model.layers[0].modulation.weight: adams if scale == "fan" else muons,
    }  # fmt: skip
    for parameter, factor in factors.items():
        assert settings[parameter] == (pytest.approx(1e-2 * factor), pytest.approx(0.1 / factor))
    assert settings[model.layers[0].attention.qkv.bias] == (pytest.approx(1e-2), 0.0)


def test_scores_of_grown_heads_are_divided_by_their_channels():
    config = network(4 * BASE, num_heads=2, mup_base_dim=BASE, mup_base_heads=2).config
    assert config.score_scale == pytest.approx(math.sqrt(16) / 64)
    q, k, v = torch.randn(3, 2, 2, 5, 64)
    weights = (q @ k.transpose(-1, -2) * config.score_scale).softmax(-1)
    assert torch.allclose(attend(q, k, v, None, None, config.score_scale), (weights @ v).transpose(1, 2).flatten(2), atol=1e-5)


def test_weights_of_grown_heads_are_not_exported():
    assert layout_problems(network(4 * BASE, mup_base_dim=BASE), "dit") == []
    (line,) = layout_problems(network(4 * BASE, num_heads=2, mup_base_dim=BASE, mup_base_heads=2), "dit")
    assert line == "model.mup_base_heads = 2: the dit layout has no factor on attention's scores"


def change(dim: int, **more) -> float:
    """Root mean square change of the last block's tokens by four steps of Adam on one batch."""
    model = network(dim, **more)
    optimizer = build_optimizer(
        dict(model.named_parameters()), OptimizerConfig(lr=1e-2), model.blocks(), fan_in_ratios=model.fan_in_ratios()
    )
    generator = torch.Generator().manual_seed(1)
    x, target = torch.randn(2, 16, *SHAPE, generator=generator)
    t, labels, seen = torch.rand(16, generator=generator), torch.arange(16) % 3, []
    model.layers[-1].register_forward_hook(lambda _, __, output: seen.append(output.detach()))
    for _ in range(5):
        (model(x, t, labels) - target).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return (seen[-1] - seen[0]).square().mean().sqrt().item()


def test_tokens_change_alike_at_every_width():
    plain, transferred = change(256) / change(BASE), change(256, mup_base_dim=BASE) / change(BASE, mup_base_dim=BASE)
    assert 1 / 1.4 < transferred < 1.4 and plain > 2, (plain, transferred)


@pytest.mark.parametrize("words, message", [
    (["--model.mup_base_heads", "2"], "model.mup_base_heads"),
    (["--model.mup_base_dim", "64", "--model.mup_base_heads", "3"], "3 does not divide model.mup_base_dim = 64"),
    (["--model.mup_base_dim", "64", "--model.embedding_per_block", "true"], "model.mup_base_dim"),
    (["--model.mup_base_dim", "64", "--lora.enable", "true"], "model.mup_base_dim: is for weights that train"),
])  # fmt: skip
def test_what_does_not_fit_is_refused(words, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        load_config(["train_configs/digits.toml", "--job.dump_folder", str(tmp_path), *words], 1)
