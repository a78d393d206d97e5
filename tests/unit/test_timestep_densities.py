"""Densities of the training timestep against published moments, scipy and each other."""

import math

import numpy as np
import pytest
import torch
from scipy import integrate, stats

from tests.objectives import timesteps
from torchtitan.diffusion.denoising import DenoisingConfig
from torchtitan.diffusion.paths import PATHS
from torchtitan.diffusion.timesteps.placement import OnDiscreteIndices, Shifted
from torchtitan.diffusion.timesteps.registry import build_density
from torchtitan.diffusion.timesteps.sampler import (
    CosMap,
    GlobalBatch,
    Laplace,
    LogitNormal,
    Mode,
    TimestepSampler,
    Uniform,
    UniformIndex,
)
from torchtitan.diffusion.timesteps.warps import Beta, Cubic, Warped

CONTINUOUS = PATHS["ddpm_cosine_continuous"]()
SMOOTH = {
    "uniform": Uniform(),
    "logit-normal": LogitNormal(-0.4, 1.0),
    "mode 1.29": Mode(1.29),
    "mode -0.9": Mode(-0.9),
    "cosmap": CosMap(),
    "shifted cosmap": Shifted(CosMap(), 3.0),
    "shifted mode": Shifted(Mode(0.81), 0.25),
    "index": UniformIndex(CONTINUOUS),
    "shifted index": Shifted(UniformIndex(CONTINUOUS), 2.0),
    "laplace": Laplace(0.7, 2.0),
    "shifted cubic to data": Shifted(Warped(Uniform(), Cubic("data")), 0.5),
    "beta 0.7 3": Warped(Uniform(), Beta(0.7, 3.0)),
    "beta 5 0.5": Warped(Uniform(), Beta(5.0, 0.5)),
}


def middles(count: int) -> torch.Tensor:
    return (torch.arange(count, dtype=torch.float64) + 0.5) / count


@pytest.mark.parametrize(("density", "deviation", "quartiles"), [
    (Mode(1.29), 0.2154, (0.38358, 0.61642)),
    (Mode(0.81), 0.2407, None),
    (Mode(0.0), 12**-0.5, (0.25, 0.75)),
    (CosMap(), 0.26136, (0.29289, 0.70711)),
    (LogitNormal(), 0.20828, (0.33749, 0.66251)),
])
def test_densities_have_their_published_moments(density, deviation, quartiles):
    t = density.quantile(middles(1_000_000))
    assert t.mean().item() == pytest.approx(0.5, abs=1e-9)
    assert t.std().item() == pytest.approx(deviation, abs=6e-5)
    if quartiles:
        found = density.quantile(torch.tensor([0.25, 0.75], dtype=torch.float64)).tolist()
        assert found == pytest.approx(quartiles, abs=6e-6)


def test_cosmap_has_its_published_density():
    t = middles(999)
    log_sigma = torch.logit(t)
    published = 2 / (torch.pi - 2 * torch.pi * t + 2 * torch.pi * t**2)
    found = CosMap().log_sigma_density(log_sigma) / (t * (1 - t))  # d ln sigma / dt
    torch.testing.assert_close(found, published, rtol=1e-10, atol=0)


def test_mode_runs_through_the_published_formula():
    u, scale = middles(1000), 1.29
    published = 1 - u - scale * (torch.cos(torch.pi * u / 2) ** 2 - 1 + u)
    torch.testing.assert_close(Mode(scale).quantile(u), published.flip(0), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", SMOOTH)
def test_distribution_inverts_the_quantile(name):
    density, u = SMOOTH[name], middles(997)
    t = density.quantile(u)
    assert (t.diff() > 0).all() and t.min() > 0 and t.max() < 1
    torch.testing.assert_close(density.distribution(torch.logit(t)), u, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", SMOOTH)
def test_density_is_the_slope_of_the_distribution(name):
    density, h = SMOOTH[name], 1e-5
    log_sigma = torch.logit(density.quantile(middles(97)))
    slope = (density.distribution(log_sigma + h) - density.distribution(log_sigma - h)) / (2 * h)
    found = density.log_sigma_density(log_sigma)
    # The index's density has a corner at every integer, which a difference may straddle.
    assert ((found / slope - 1).abs() < 1e-5).double().mean() > (0.95 if "index" in name else 0.999)


def test_logit_normal_time_is_lognormal_sigma_and_a_shift_moves_its_mean():
    u = middles(10_001)
    log_sigma = torch.logit(LogitNormal(-1.2, 1.2).quantile(u))
    np.testing.assert_allclose(log_sigma, stats.norm(-1.2, 1.2).ppf(u.numpy()), rtol=0, atol=1e-11)
    for factor in (3.0, math.exp(1.15), 0.2):
        shifted = Shifted(LogitNormal(0.3, 0.8), factor).quantile(u)
        moved = LogitNormal(0.3 + math.log(factor), 0.8).quantile(u)
        torch.testing.assert_close(shifted, moved, rtol=0, atol=1e-12)


# --- on a DDPM path


@pytest.mark.parametrize("path", ["ddpm_linear", "ddpm_cosine"])
def test_uniform_on_a_discrete_path_gives_every_index_the_same_mass(path):
    path = PATHS[path]()
    density = build_density(DenoisingConfig(timesteps=timesteps("uniform")), path)
    index = path.t_to_index(density.quantile(middles(7000)))
    assert torch.equal(index, torch.arange(1000).repeat_interleave(7))


def test_uniform_on_a_continuous_path_is_uniform_over_real_indices():
    density = build_density(DenoisingConfig(timesteps=timesteps("uniform")), CONTINUOUS)
    index = CONTINUOUS.t_to_index(density.quantile(middles(5000)))
    torch.testing.assert_close(index, 999 * middles(5000), rtol=0, atol=1e-7)


def test_masses_of_a_discrete_path_are_the_density_s_between_middles():
    path = PATHS["ddpm_linear"]()
    density = OnDiscreteIndices(LogitNormal(-0.5, 1.3), path)
    bar = path.alphas_cumprod.numpy()
    level = 0.5 * np.log((1 - bar) / bar)
    ends = [1.5 * level[0] - 0.5 * level[1]], [1.5 * level[-1] - 0.5 * level[-2]]
    edges = np.concatenate((ends[0], (level[1:] + level[:-1]) / 2, ends[1]))
    masses = np.diff(stats.norm(-0.5, 1.3).cdf(edges))
    index = path.t_to_index(density.quantile(middles(500_000))).numpy()
    np.testing.assert_allclose(np.bincount(index, minlength=1000) / 5e5, masses / masses.sum(), rtol=0, atol=4.1e-6)
    found = density.log_sigma_density(torch.from_numpy(level)).numpy()
    np.testing.assert_allclose(found * np.diff(edges), masses / masses.sum(), rtol=1e-7)


@pytest.mark.parametrize("path", [name for name in PATHS if name.startswith("ddpm")])
@pytest.mark.parametrize("sampler", ["uniform", "logit_normal", "mode", "cosmap"])
def test_densities_on_indices_integrate_to_one_and_are_zero_outside(path, sampler):
    path = PATHS[path]()
    density = build_density(DenoisingConfig(timesteps=timesteps(sampler), shift=1.5), path)
    low, high = path.index_to_log_sigma(torch.tensor([-0.5, path.num_indices - 0.5])).tolist()
    points = torch.linspace(low - 0.5, high + 0.5, 200_001, dtype=torch.float64)
    found = density.log_sigma_density(points)
    assert integrate.trapezoid(found, x=points) == pytest.approx(1, abs=5e-4)
    assert (found[(points < low) | (points > high)] == 0).all()
    t = density.quantile(middles(1000))
    assert path.t_to_index(t).min() >= 0 and path.t_to_index(t).max() <= 999 and (t.diff() >= 0).all()


# --- low discrepancy


@pytest.mark.parametrize("ranks", [1, 4])
def test_low_discrepancy_quantiles_of_a_global_batch_are_equally_spaced(ranks):
    size = 60
    sampler = TimestepSampler(Uniform(), seed=9, spread="low_discrepancy")
    offsets, orders = [], []
    for step in range(20):
        batch = GlobalBatch(step * size, size)
        members = torch.arange(step * size, (step + 1) * size)
        u = torch.cat([sampler._quantiles(batch, part) for part in members.chunk(ranks)])
        ordered = u.sort().values
        upper = torch.arange(1, size + 1, dtype=torch.float64) / size
        torch.testing.assert_close(ordered, ordered[0] + upper - 1 / size, rtol=0, atol=1e-14)
        assert ordered[0] < 1 / size
        # Star discrepancy: no interval [0, x) is off by more than one draw.
        assert torch.maximum((upper - ordered).abs(), (upper - 1 / size - ordered).abs()).max() <= 1 / size + 1e-12
        offsets.append(ordered[0].item() * size)
        orders.append(u.argsort().tolist())
    assert stats.kstest(offsets, "uniform").pvalue > 1e-3 and orders[0] != orders[1]
