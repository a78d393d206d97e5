"""Consistency training: its fixed point on Gaussian data, and a training whose single-step samples vary as data do."""

import math
from unittest.mock import patch

import pytest
import torch

from torchtitan.config.job import ConfigError, load_config
from torchtitan.diffusion import consistency
from torchtitan.diffusion.consistency import ConsistencyConfig
from torchtitan.diffusion.objective import Draw, LossTerms, Microbatch
from torchtitan.diffusion.objectives import build_objective, objective_problems
from torchtitan.diffusion.paths import PATHS
from torchtitan.trainer import Trainer

DATA_STD, T, RATIO = 0.7, 0.6, 0.8


def slope(path_name: str, t: float) -> float:
    """The fixed point x0 = slope x_t on data of DATA_STD: the product of regressions of x_s on x_t down to t = 0."""
    path, found = PATHS[path_name](), 1.0
    while t > 1e-9:
        (a, b), (a_s, b_s) = (
            [c.item() for c in path.coefficients(torch.tensor([time], dtype=torch.float64))] for time in (t, RATIO * t)
        )
        found *= (a_s * a * DATA_STD**2 + b_s * b) / ((a * DATA_STD) ** 2 + b**2)
        t *= RATIO
    return found


@pytest.mark.parametrize("path", ["rectified_flow", "edm"])
def test_the_exact_solution_on_gaussian_data_has_no_gradient_and_others_have(path, monkeypatch):
    # A distance far from its turn is quadratic, and the fixed point that of a regression.
    monkeypatch.setattr(consistency, "HUBER_C", 1e4)
    config = ConsistencyConfig(path=path, step_ratio=RATIO)
    objective, count = build_objective(config, 0), 200_000
    generator = torch.Generator().manual_seed(0)
    x0 = DATA_STD * torch.randn(count, 1, 1, 1, generator=generator, dtype=torch.float64)
    noise = torch.randn(count, 1, 1, 1, generator=generator, dtype=torch.float64)
    draw = Draw(torch.full((count,), T, dtype=torch.float64), noise, torch.ones(count, dtype=torch.float64))

    def gradient(error: float) -> float:
        """Of the loss in a change of the estimate at the larger time alone, from a solution that is off by `error`."""
        change = torch.zeros((), dtype=torch.float64, requires_grad=True)

        def network(x, _time, _condition):
            later = torch.is_grad_enabled()
            t = T if later else RATIO * T
            wanted = slope(path, t) * (1 + error * later) + change * later
            a, b = (c.item() for c in objective.path.coefficients(torch.tensor([t], dtype=torch.float64)))
            return (1 / b - (a + b) / b * wanted) * x  # the velocity with which x0 is wanted * x

        objective.loss(network, Microbatch(x0), draw).loss.mean().backward()
        return change.grad.item()

    exact, off = gradient(0.0), gradient(0.05)
    assert abs(exact) < 0.05 * abs(off)


@pytest.mark.parametrize("shape", [(3, 32, 32), (4, 64, 64), (1, 8, 8)])
def test_the_distance_is_the_published_one_up_to_the_root_of_the_size(shape):
    objective, size = build_objective(ConsistencyConfig(), 0), math.prod(shape)
    generator = torch.Generator().manual_seed(0)
    x0, noise = (torch.randn(6, *shape, generator=generator, dtype=torch.float64) for _ in range(2))
    # Differences on both sides of the turn, and near it; outputs of networks are float32.
    scale = torch.logspace(-5, -1, 6, dtype=torch.float64).view(-1, 1, 1, 1)
    wanted, off = ((noise - x0 * factor).float().double() for factor in (1, 1 + scale))  # velocities at the two times
    t = torch.full((6,), T, dtype=torch.float64)
    draw = Draw(t, noise, torch.ones_like(t))
    found = objective.loss(lambda *_: off if torch.is_grad_enabled() else wanted, Microbatch(x0), draw).loss
    estimates = [(1 - time) * x0 + time * noise - time * velocity for time, velocity in ((T, off), (0.9 * T, wanted))]
    c = 0.00054 * math.sqrt(size)  # 0.03 for CIFAR-10
    published = ((estimates[0] - estimates[1]).square().sum((1, 2, 3)) + c**2).sqrt() - c
    # The slope of the distance is 1 at most: it errs by what its differences do, a few roundings of the largest value each.
    rounding = 16 * torch.finfo(torch.float64).eps
    largest = max(estimate.abs().max().item() for estimate in (x0, noise, off, wanted))
    bound = rounding * largest * math.sqrt(size)
    torch.testing.assert_close(found * (1 - 0.9) * math.sqrt(size), published, rtol=rounding, atol=bound)


def test_paths_in_steps_and_estimates_that_do_not_end_at_the_image_are_refused():
    def keys(**changes) -> list[str]:
        return [key for key, _ in objective_problems(ConsistencyConfig(**changes))]

    assert keys() == []
    assert keys(path="ddpm_linear", prediction="v") == ["objective.path"]
    assert keys(prediction="x0") == ["objective.prediction"]
    assert keys(path="edm", prediction="x0", preconditioning="edm") == []


def test_a_training_by_name_draws_in_one_step_what_denoising_does_not(tmp_path):
    spread = {}
    for name in ("consistency", "denoising"):
        arguments = [
            "--objective.name", name, "--data.name", "synthetic", "--data.shape", "[1, 4, 4]",
            "--data.pixel_variance", "0.25", "--data.spectrum_alpha", "0",
            "--data.num_classes", "0", "--model.flavor", "debug", "--model.patch_size", "2",
            "--training.steps", "100", "--training.local_batch_size", "64", "--optimizer.lr", "3e-3",
            "--lr_scheduler.warmup_steps", "5", "--job.dump_folder", str(tmp_path), "--job.name", name,
            "--sampling.enable", "false",
            "--metrics.enable_tensorboard", "false",
        ]  # fmt: skip
        spread[name] = train_and_draw(arguments)
    # Data deviate by 0.5, and the solution at this ratio of times by 0.477; the untrained network hands noise on, 1.
    # Of denoising, the estimate at t = 1 is the mean of the data, 0.
    assert abs(spread["consistency"] - 0.477) < 0.15 and spread["denoising"] < 0.25, spread


def train_and_draw(arguments: list[str]) -> float:
    """Train by a quadratic distance; standard deviation of the estimates of x0 from pure noise."""
    with patch.object(consistency, "HUBER_C", 10.0):
        trainer = Trainer(load_config(arguments, 1))
        assert trainer.train() == 0
    trainer.close()
    state = trainer.state
    noise = torch.randn(256, *state.info.image_shape, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        x0, _ = state.objective.predict(state.model, noise, torch.ones(256), None)
    assert math.isfinite(x0.std())
    return x0.std().item()


def test_a_variance_that_the_objective_does_not_train_is_refused():
    words = ["--objective.name", "consistency", "--model.learned_variance", "true"]
    with pytest.raises(ConfigError, match="model.learned_variance: objective.name = consistency does not train it"):
        load_config(words, 1)


def test_terms_that_are_not_one_per_image_are_refused():
    value, t = torch.zeros(()), torch.zeros(4)
    with pytest.raises(ValueError, match=r"loss of the objective is \[\], one per image is \[4\]"):
        LossTerms(value, t, t, t)
