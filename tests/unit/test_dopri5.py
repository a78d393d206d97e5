"""Adaptive solver against the closed form of Gaussian data, and against scipy's integrator of the same pair."""

import math

import numpy as np
import pytest
import torch
from scipy.integrate import solve_ivp

from tests.unit.test_solvers_accuracy import DATA_STD, gaussian_predict, no_noise
from torchtitan.conditions import Classes
from torchtitan.config.job import ConfigError, load_config
from torchtitan.diffusion.denoising import DenoisingConfig
from torchtitan.diffusion.guidance import Guidance, predictor
from torchtitan.diffusion.objectives import build_objective
from torchtitan.diffusion.paths import PATHS
from torchtitan.diffusion.solvers import SOLVERS, uniform_times

PATH = PATHS["rectified_flow"]()


def solved(predict, x, first_steps=10, **options):
    calls = []

    def counted(x_t, t):
        calls.append(t.clone())
        return predict(x_t, t)

    return SOLVERS["dopri5"].solve(counted, PATH, x, uniform_times(first_steps), no_noise, **options), calls


def jagged(x, t):
    """Field that changes fast at one time, at another for each half of the values."""
    bump = torch.exp(-((t - 0.5) / 0.02) ** 2).reshape(-1, *[1] * (x.ndim - 1))
    velocity = torch.sin(3 * x) + 4 * bump
    t = t.reshape(bump.shape)
    return x - t * velocity, x + (1 - t) * velocity


@pytest.mark.parametrize(("path_name", "start"), [("rectified_flow", 1.0), ("ddpm_cosine_continuous", 0.97), ("edm", 0.97)])
def test_the_end_is_as_exact_as_asked_for(path_name, start):
    path = PATHS[path_name]()
    times = torch.linspace(start, 0, 11, dtype=torch.float64)
    (a, b), (a0, b0) = path.coefficients(times[0]), path.coefficients(times[-1])
    wanted = math.sqrt((a0 * DATA_STD) ** 2 + b0**2) / math.sqrt((a * DATA_STD) ** 2 + b**2)
    errors = []
    for tolerance in (1e-3, 1e-5, 1e-7):
        x = torch.ones(1, 1, dtype=torch.float64)
        end = SOLVERS["dopri5"].solve(gaussian_predict(path), path, x, times, no_noise, rtol=tolerance, atol=tolerance)
        errors.append(abs(end.item() - wanted))
        assert errors[-1] < 10 * tolerance + 1e-7
    assert errors[2] < errors[0]


def test_it_needs_about_as_many_evaluations_as_scipys():
    x = torch.tensor([[0.3]], dtype=torch.float64)
    end, calls = solved(jagged, x, rtol=1e-6, atol=1e-6)

    def field(s, y):  # SciPy's time rises, and so does ours below: s = 1 - t
        x0, noise = jagged(torch.tensor(y)[None], torch.tensor([1 - s], dtype=torch.float64))
        return -(noise - x0)[0].numpy()

    theirs = solve_ivp(field, (0, 1 - 1e-4), [0.3], method="RK45", rtol=1e-6, atol=1e-6, first_step=0.1)
    assert end.item() == pytest.approx(theirs.y[0, -1], abs=2e-4)
    assert 0.6 * theirs.nfev < len(calls) < 1.5 * theirs.nfev
    assert len(solved(jagged, x, rtol=1e-3, atol=1e-3)[1]) < 0.6 * len(calls)


def test_an_image_takes_its_own_steps_whatever_is_beside_it():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 1, 2, 2, generator=generator, dtype=torch.float64) * torch.tensor([0.1, 1.0, 4.0]).reshape(3, 1, 1, 1)
    together, calls = solved(jagged, x)
    assert any(t.unique().numel() > 1 for t in calls)
    alone = torch.cat([solved(jagged, x[i : i + 1])[0] for i in range(3)])
    assert torch.equal(together, alone)  # nothing is summed over images


def test_images_at_different_times_are_guided_each_by_its_own():
    objective, kind = build_objective(DenoisingConfig(), 0), Classes(3)

    def network(x, time, condition):
        return x * condition.float().reshape(-1, 1, 1, 1)

    condition, t = torch.tensor([1, 1, 1]), torch.tensor([0.1, 0.5, 0.9])
    x = torch.from_numpy(np.random.default_rng(0).normal(size=(3, 1, 2, 2)).astype(np.float32))
    mixed = predictor(objective, network, kind, condition, Guidance(2.0, (0.3, 0.7)))(x, t)
    for place, scale in enumerate((1.0, 2.0, 1.0)):
        alone = predictor(objective, network, kind, condition[:1], Guidance(scale))(x[place : place + 1], t[place : place + 1])
        torch.testing.assert_close(mixed.x0[place : place + 1], alone.x0)


@pytest.mark.parametrize(("keys", "ranks", "text"), [
    (["--objective.path", "ddpm_linear", "--objective.preconditioning", "index"], 1, "dopri5 needs every time"),
    (["--parallelism.data_parallel_shard_degree", "2", "--gns.enable", "false"], 2, "which shards must do together"),
])  # fmt: skip
def test_where_it_cannot_be_used_is_refused(keys, ranks, text):
    with pytest.raises(ConfigError, match="sampling.solver.name") as refused:
        load_config(["--data.name", "digits", "--sampling.solver.name", "dopri5", *keys], ranks)
    assert text in str(refused.value)
