"""Published code run beside this one once, in float64, on weights that are sines of their places; here are its numbers.

JiT's network, loss and sampler; REPA's projector and loss; RAE's network with a wide head; LightningDiT's and SiT's networks
with an intermediate head, SiT's sampler with internal guidance. Objectives are those of the presets.
"""

import math
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.objectives import schedule, solver
from torchtitan.alignment.loss import cosine_loss
from torchtitan.alignment.projectors import MLPProjector
from torchtitan.conditions import Classes
from torchtitan.config.job import load_config
from torchtitan.diffusion.guidance import Guidance, HeadGuide, predictor
from torchtitan.diffusion.objective import Draw, Microbatch, Objective
from torchtitan.diffusion.objectives import build_objective
from torchtitan.models import MODELS
from torchtitan.models.dit.config import FLAVORS
from torchtitan.models.dit.model import DiT

PRESETS = Path(__file__).parents[2] / "train_configs" / "imagenet256"
SMALL = dict(dim=32, num_layers=3, num_heads=2)
LIGHTNING = replace(
    FLAVORS["DiT-XL/2"], **SMALL, patch_size=1, mlp="swiglu_bias", mlp_hidden_dim=85, norm="rmsnorm", norm_affine=True,
    position="sincos_rotary", intermediate_head=1,
)  # fmt: skip
JIT = replace(
    FLAVORS["JiT-B/16"], **SMALL, mlp_hidden_dim=85, patch_size=4, patch_bottleneck=10, class_tokens=5, class_tokens_start=1
)  # fmt: skip
WIDE = replace(FLAVORS["DiT-DH-XL/1"], dim=48, num_layers=3, num_heads=3, mlp_hidden_dim=128, wide_dim=96, wide_heads=4)
SIT = replace(FLAVORS["DiT-S/2"], **SMALL, mlp_hidden_dim=128, intermediate_head=1)
NETWORKS = {"jit_b16": (JIT, (3, 8, 8)), "rae_dh_xl": (WIDE, (20, 4, 4)), "lightningdit_xl1": (LIGHTNING, (4, 4, 4))}
NETWORKS["sit"] = SIT, (4, 4, 4)
HEAD = ("--model.flavor", "debug", "--model.intermediate_head", "1", "--objective.intermediate_share", "0.5")
NUM_CLASSES = 7
CONDITIONS, TIMES = torch.tensor([0, 3, 7, 6]), torch.tensor([0.02, 0.3, 0.62, 0.97], dtype=torch.float64)
# name: numbers of the output, of the intermediate head behind them; the loss, and the norm of its gradient.
WANTED = {
    "jit_b16": [1.0320898342916247, 0.02015468316807705, 140.38188208878094, 420.41303347845957],
    "rae_dh_xl": [1.5205764778141408, -0.05952597501120984, 2.4355797845736045, 11.78984677908769],
    "lightningdit_xl1": [
        0.9109471564789287, 0.06580076877734874, 1.19475111513243, -0.004390325229059806, 2.7434259801948278, 7.2948747921850545
    ],
}  # fmt: skip
REPA = [-0.042348871236848565, 0.015271941710508184, 0.8494718924678765]  # the loss, and norms of two gradients
JIT_SAMPLES = [1.7551969058748365, -0.006590338040232759]
SIT_SAMPLES = [1.3796680405812898, -0.0038014098396723316]


def waves(shape: tuple[int, ...], phase: float) -> Tensor:
    places = torch.arange(1, math.prod(shape) + 1, dtype=torch.float64)
    return torch.sin(0.37 * places**1.5 + phase).reshape(shape)


def network(name: str, dtype: torch.dtype = torch.float64) -> DiT:
    config, image_shape = NETWORKS[name]
    model = MODELS["dit"].build(config, image_shape, Classes(NUM_CLASSES)).to(dtype)
    model.init_buffers()
    with torch.no_grad():
        for number, (key, parameter) in enumerate(model.named_parameters()):
            values = waves(parameter.shape, number)
            narrow = parameter.ndim == 1 or key.startswith(("label_embed", "class_tokens"))
            values = values * (0.3 if narrow else (2 / parameter.shape[1]) ** 0.5)
            parameter.copy_(values + key.endswith("norm.weight"))
        if config.timestep_frequencies == "fourier":
            model.waves.frequencies = 2 * waves((256,), 0.5).to(dtype)
    return model


def objective_of(name: str, folder: Path, *words: str) -> Objective:
    """Objective of a preset."""
    text = (PRESETS / f"{name}.toml").read_text()
    text = text[text.index("[objective]") : text.index("[optimizer]")]
    (folder / "config.toml").write_text(f'[model]\nflavor = "debug"\n[data]\nname = "synthetic"\n{text}')
    return build_objective(load_config([str(folder / "config.toml"), *words], 1).objective, 0)


def numbers(images: Tensor) -> list[float]:
    """Root mean square, and the mean against waves."""
    return [images.square().mean().sqrt().item(), (images * waves(images.shape, 0.1)).mean().item()]


@pytest.mark.parametrize("name", WANTED)
def test_outputs_loss_and_gradient_are_the_published_code_s(name, tmp_path):
    model, objective = network(name), objective_of(name, tmp_path, *(HEAD if name == "lightningdit_xl1" else ()))
    shape = (4, *NETWORKS[name][1])
    x0, noise = waves(shape, 0.2), 1.4 * waves(shape, 0.3)
    seen: list[Tensor] = []
    model.register_forward_hook(lambda module, arguments, output: seen.append(output))
    draw = Draw(TIMES, noise, torch.ones(4))
    loss = objective.loss(model, Microbatch(x0, CONDITIONS, kept=objective.kept(torch.ones(4), 0.1)), draw).loss.mean()
    loss.backward()
    gradient = math.sqrt(sum(parameter.grad.square().sum().item() for parameter in model.parameters()))
    found = [value for part in seen[0].split(x0.shape[1], dim=1) for value in numbers(part)]
    assert [*found, loss.item(), gradient] == pytest.approx(WANTED[name], rel=1e-7)


def test_the_loss_of_projected_tokens_is_repa_s_code_s():
    projector = MLPProjector(32, 48, (3, 3)).double()
    with torch.no_grad():
        for number, parameter in enumerate(projector.parameters()):
            parameter.copy_(waves(parameter.shape, number) * (0.3 if parameter.ndim == 1 else (2 / parameter.shape[1]) ** 0.5))
    tokens = waves((4, 9, 32), 0.2).requires_grad_()
    loss = cosine_loss(projector(tokens), 1.4 * waves((4, 9, 48), 0.3)).mean()
    loss.backward()
    gradient = math.sqrt(sum(parameter.grad.square().sum().item() for parameter in projector.parameters()))
    assert [loss.item(), tokens.grad.norm().item(), gradient] == pytest.approx(REPA, rel=1e-7)


def test_samples_are_those_of_jit_s_code(tmp_path):
    """Ten steps: guidance is for times below 0.9, which is the time of one, and no time but the last is below 0.05."""
    interval = tomllib.loads((PRESETS / "jit_b16.toml").read_text())["sampling"]["guidance_interval"]
    method = solver("heun"), schedule("uniform"), 10
    found = sampled("jit_b16", objective_of("jit_b16", tmp_path), *method, Guidance(2.9, tuple(interval)))
    assert found == pytest.approx(JIT_SAMPLES, rel=1e-5, abs=1e-6)


def test_samples_with_internal_and_classifier_free_guidance_are_those_of_sit_s_code(tmp_path):
    words = ["--data.name", "synthetic", "--objective.preconditioning", "data_time", *HEAD]
    method = solver("euler_maruyama", diffusion_scale=2.0, last_step="mean"), schedule("uniform", last_step=0.04), 6
    objective = build_objective(load_config(words, 1).objective, 0)
    guidance = Guidance(1.4, (0.3, 1.0), "all", 1.35, (0.0, 0.7))
    assert sampled("sit", objective, *method, guidance, HeadGuide()) == pytest.approx(SIT_SAMPLES, rel=1e-5, abs=1e-6)


@torch.no_grad()
def sampled(name, objective, method, times, steps, guidance, guide=None) -> list[float]:
    """Numbers of samples from noise of waves, as by `[sampling]` with a state in float64."""
    shape = (3, *NETWORKS[name][1])
    predict = predictor(objective, network(name, torch.float32), Classes(NUM_CLASSES), torch.tensor([0, 3, 6]), guidance, guide)
    grid, start = times.times(objective.path, steps, lambda: 0), 1.4 * waves(shape, 0.7)
    return numbers(method.solve(predict, objective.path, start, grid, lambda step: 1.4 * waves(shape, step), **method.options()))
