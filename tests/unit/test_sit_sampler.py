"""SiT's stochastic sampler written anew in its code's own time, 0 noise and 1 data; ends of the guidance interval; tails."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

from tests.unit.test_learned_variance import level_log_probability
from torchtitan.conditions import Unconditional
from torchtitan.config.job import load_config
from torchtitan.diffusion.denoising import DenoisingConfig
from torchtitan.diffusion.guidance import Guidance, Guide, predictor
from torchtitan.diffusion.learned_variance import _log_level_probability
from torchtitan.diffusion.objectives import build_objective
from torchtitan.diffusion.paths import PATHS
from torchtitan.diffusion.solvers.schedules import uniform_times

ROOT = Path(__file__).resolve().parents[2]
NUM_STEPS, LAST = 25, 0.04


def velocity(x: torch.Tensor, s: float) -> torch.Tensor:
    """Any smooth field of data - noise, as a function of SiT's time s = 1 - t."""
    return torch.sin(3 * x + s) - 0.5 * x


def predict(x: torch.Tensor, t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    t0 = float(t.flatten()[0])
    slope = -velocity(x, 1 - t0)  # noise - data
    return x - t0 * slope, x + (1 - t0) * slope


def test_the_preset_samples_as_sits_code():
    """Its `sample_ddp.py --mode SDE`: dx = (v + sigma s) ds + sqrt(2 sigma) dW over 0 .. 0.96, then "Mean" of 0.04."""
    preset = ["--job.config_file", str(ROOT / "train_configs" / "sit_xl2_256.toml"), "--data.name", "synthetic"]
    config = load_config(preset, 1).sampling
    assert (config.num_steps, config.guidance_channels, config.guidance_scale) == (250, "first_three", 1.5)
    path = PATHS["rectified_flow"]()
    times = config.schedule.times(path, NUM_STEPS, lambda: 256)
    x = torch.linspace(-2, 2, 6, dtype=torch.float64)[None]
    noises = [torch.randn(1, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64) for step in range(NUM_STEPS)]
    found = config.solver.solve(predict, path, x, times, noises.__getitem__, **config.solver.options())

    def drift(x, s):
        sigma = 1 - s
        score = -(x - s * (x + sigma * velocity(x, s))) / sigma**2  # of N(s data, sigma^2), data = x + sigma v
        return velocity(x, s) + sigma * score

    grid = np.linspace(0, 1 - LAST, NUM_STEPS)
    for step, s in enumerate(grid[:-1]):
        size = grid[1] - grid[0]
        x = x + drift(x, s) * size + math.sqrt(2 * (1 - s)) * math.sqrt(size) * noises[step]
    # A step rounds by some ten units of float64 (the score's division by sigma^2 is undone by sigma and the step's size), which
    # the flow, whose slope is at most 3.5, carries on by a factor of e^3.5 at most.
    bound = NUM_STEPS * 10 * torch.finfo(torch.float64).eps * math.exp(3.5)
    torch.testing.assert_close(found, x + LAST * drift(x, 1 - LAST), rtol=0, atol=bound)


def test_the_last_step_has_its_size_and_the_others_are_equal():
    times = uniform_times(25, last_step=0.04)
    assert len(times) == 26 and times[0] == 1 and times[-2] == pytest.approx(0.04) and times[-1] == 0
    torch.testing.assert_close(times[:-1].diff(), torch.full((24,), -0.04, dtype=torch.float64))


@pytest.mark.parametrize(("keys", "text"), [
    (["--sampling.schedule.last_step", "1.5"], "1.5 leaves nothing of 1 (make it smaller)"),
    (["--sampling.schedule.last_step", "0.1", "--sampling.schedule.shift", "2"], "is not kept by sampling.schedule.shift = 2"),
])  # fmt: skip
def test_a_last_step_that_cannot_be_is_refused(keys, text):
    with pytest.raises(Exception, match="sampling.schedule.last_step") as refused:
        load_config(["--data.name", "synthetic", "--sampling.schedule.name", "uniform", *keys], 1)
    assert text in str(refused.value)


@pytest.mark.parametrize(("interval", "wanted"), [((0.2, 0.8), 7), ((0.25, 0.75), 5), ((0.0, 1.0), 10), ((0.3, 0.3), 1)])
def test_steps_at_both_ends_of_the_interval_are_guided(interval, wanted):
    """Of ten steps from times 1.0, 0.9, ..., 0.1."""
    objective = build_objective(DenoisingConfig(), 0)
    calls = []

    def guide(x, time, condition):
        calls.append(1)
        return x

    estimates = predictor(
        objective, lambda x, time, condition: 0.5 * x, Unconditional(), None, Guidance(2.0, interval),
        Guide(guide, objective, conditional=False),
    )  # fmt: skip
    for t in uniform_times(10)[:-1]:
        estimates(torch.ones(1, 1, 2, 2), t.float().expand(1))
    assert len(calls) == wanted


def test_probabilities_of_levels_far_from_the_mean_are_exact_and_have_gradients():
    x = torch.tensor([0.5, -0.5, 1.0, -1.0, 0.0, 0.9, 1.0])
    mean = torch.tensor([-0.9, 0.9, -1.0, 1.0, 0.001, 0.89, 0.99], requires_grad=True)
    log_variance = torch.full_like(x, math.log(0.02**2))
    found = _log_level_probability(x, mean, log_variance)
    centre = mean.detach().double().numpy()
    wanted = level_log_probability(stats.norm(centre, 0.02), centre, x.double().numpy())
    np.testing.assert_allclose(found.detach().double().numpy(), wanted, rtol=1e-4)
    assert wanted.min() < -2000  # where the mass itself is 0 even in float64
    found.sum().backward()
    slopes = mean.grad
    assert slopes.isfinite().all() and slopes[0] > 1000 and slopes[1] < -1000
