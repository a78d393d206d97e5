"""The velocity's error as a weight on any prediction, and noise of another deviation, as JiT trains, by closed forms."""

import pytest
import torch
from torch import Tensor

from tests.objectives import schedule, solver, weighting
from torchtitan import philox
from torchtitan.conditions import Condition, Unconditional
from torchtitan.config.job import ConfigError, load_config
from torchtitan.diffusion.denoising import DenoisingConfig
from torchtitan.diffusion.objective import Microbatch, Objective
from torchtitan.diffusion.objectives import build_objective
from torchtitan.diffusion.paths import PATHS
from torchtitan.diffusion.predictions import PREDICTIONS, target
from torchtitan.diffusion.timesteps.sampler import GlobalBatch
from torchtitan.diffusion.weightings import prediction_weighting
from torchtitan.evaluation.config import SamplingConfig
from torchtitan.evaluation.sampling import ImageSampler
from torchtitan.evaluation.validation import held_out_draw

SHAPE, NUMBERS = (1, 2, 2), torch.arange(6)


def weight(path: str, prediction: str, floor: float, t: Tensor) -> Tensor:
    config = DenoisingConfig(path=path, prediction=prediction, weighting=weighting("velocity", floor=floor))
    return prediction_weighting(config, PATHS[path]())(t / (1 - t))


def test_weight_of_x0_has_jit_s_values():
    t = torch.tensor([0.01, 0.05, 0.1, 0.5, 0.9], dtype=torch.float64)
    wanted = torch.tensor([400, 400, 100, 4, 1 / 0.81], dtype=torch.float64)
    torch.testing.assert_close(weight("rectified_flow", "x0", 0.05, t), wanted, rtol=1e-12, atol=0)


@pytest.mark.parametrize("path", ["rectified_flow", "edm", "ddpm_cosine"])
def test_without_a_floor_the_weighted_error_of_any_prediction_is_the_velocity_s(path):
    x0, noise, guess = torch.randn(3, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    t = torch.linspace(0.02, 0.98, 50, dtype=torch.float64)
    a, b = PATHS[path]().coefficients(t)
    x_t = a * x0 + b * noise
    implied = (x_t - a * guess) / b - guess  # of the estimate `guess` of x0
    velocity = (implied - (noise - x0)) ** 2
    for prediction in PREDICTIONS:
        output = target(prediction, guess, (x_t - a * guess) / b, a, b)
        error = (output - target(prediction, x0, noise, a, b)) ** 2
        torch.testing.assert_close(weight(path, prediction, 0.0, t) * error, velocity, rtol=1e-12, atol=0, msg=prediction)


def test_loss_is_jit_s_with_its_division_clamped_and_noise_of_deviation_2():
    """Both velocities are (x - z) / max(1 - tau, 0.05) with z = tau x + (1 - tau) 2 e."""
    keys = {"prediction": "x0", "noise_std": 2.0, "weighting": weighting("velocity")}
    objective = build_objective(DenoisingConfig(**keys), seed=3)
    images = philox.normal(0, "synthetic_data", NUMBERS, SHAPE)
    draw = objective.draw(SHAPE, GlobalBatch(0, 6), NUMBERS)._replace(t=torch.tensor([0.01, 0.04, 0.2, 0.5, 0.8, 1.0]))
    seen = {}

    def network(x: Tensor, time: Tensor, condition: Condition) -> Tensor:
        seen["z"], seen["time"] = x, time
        return torch.tanh(x)

    found = objective.loss(network, Microbatch(images), draw)
    e, tau = philox.normal(3, "noise", NUMBERS, SHAPE).double(), 1 - draw.t.double().reshape(-1, 1, 1, 1)
    z = tau * images.double() + (1 - tau) * 2 * e
    torch.testing.assert_close(seen["z"].double(), z, rtol=0, atol=1e-6)
    assert torch.equal(seen["time"], 1000 * draw.t)
    velocities = [(x - z) / (1 - tau).clamp(min=0.05) for x in (images.double(), torch.tanh(z))]
    wanted = ((velocities[0] - velocities[1]) ** 2).mean((1, 2, 3))
    torch.testing.assert_close(found.loss.double(), wanted, rtol=1e-5, atol=0)


class OfScale(torch.nn.Module):
    """Network of images and noise multiplied by `scale`: f(x) = scale g(x / scale)."""

    image_shape, condition_kind = SHAPE, Unconditional()

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: Tensor, time: Tensor, condition: Condition = None) -> Tensor:
        return self.scale * torch.tanh(0.6 * x / self.scale + 0.001 * time.reshape(-1, 1, 1, 1))


def both(**keys) -> list[tuple[Objective, OfScale]]:
    return [(build_objective(DenoisingConfig(noise_std=std, **keys), seed=3), OfScale(std)) for std in (1.0, 2.0)]


@pytest.mark.parametrize("name", ["euler", "heun", "euler_maruyama", "ddim", "edm_heun"])
@pytest.mark.parametrize("prediction", ["x0", "velocity"])
def test_samples_are_those_of_unit_noise_in_units_of_the_deviation(name, prediction):
    of_edm = name == "edm_heun"
    options = {"churn": 10.0} if of_edm else {"eta": 1.0} if name == "ddim" else {}
    method = SamplingConfig(
        solver=solver(name, **options), schedule=schedule("edm" if of_edm else "uniform"), num_steps=5,
    ).method()  # fmt: skip
    unit, twice = (
        ImageSampler(network, objective, "float32", torch.device("cpu")).draw(NUMBERS, 5, batch_size=4, **method)
        for objective, network in both(prediction=prediction)
    )
    torch.testing.assert_close(twice, 2 * unit, rtol=1e-5, atol=1e-5)


def test_training_and_held_out_losses_are_those_of_halved_images():
    images = philox.normal(0, "synthetic_data", NUMBERS, SHAPE)
    losses = []
    for scale, (objective, network) in zip((1.0, 2.0), both(prediction="x0", weighting=weighting("velocity")), strict=True):
        draws = objective.draw(SHAPE, GlobalBatch(0, 6), NUMBERS), held_out_draw(objective, 1, NUMBERS, 6, SHAPE)
        batch = Microbatch(scale * images)
        losses.append(torch.stack([objective.loss(network, batch, draw).weighted / scale**2 for draw in draws]))
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=0)


def test_noise_of_another_deviation_is_for_the_straight_path_and_plain_inputs():
    for given, why in (("path", "ddpm_cosine"), ("preconditioning", "edm")):
        arguments = ["--objective.noise_std", "2", f"--objective.{given}", why, "--objective.prediction", "x0"]
        with pytest.raises(ConfigError, match=f"objective.noise_std: has no effect when objective.{given} = {why}"):
            load_config(["--data.name", "synthetic", *arguments], 1)
