"""Timesteps drawn by shares of bins: counts, masses, places within a bin and importance weights, for every density."""

import json

import pytest
import torch
from scipy import stats

from tests.objectives import timesteps
from torchtitan.diffusion.denoising import DenoisingConfig
from torchtitan.diffusion.paths import PATHS
from torchtitan.diffusion.timesteps.registry import build_density
from torchtitan.diffusion.timesteps.sampler import GlobalBatch, LogitNormal, TimestepSampler, Uniform
from torchtitan.diffusion.timesteps.shares import AllocatedTimesteps, bin_masses, bin_means

PATH_NAMES = ("rectified_flow", "ddpm_linear", "ddpm_cosine", "ddpm_linear_continuous", "ddpm_cosine_continuous")
SAMPLERS = ("uniform", "logit_normal", "mode", "cosmap")
DENSITIES = {
    f"{name} x{shift:g} on {path}": build_density(DenoisingConfig(timesteps=timesteps(name), shift=shift), PATHS[path]())
    for name in SAMPLERS
    for path in PATH_NAMES
    for shift in ((1.0, 2.5) if path == "ddpm_cosine" else (1.0,))
}
EDGES = torch.tensor([0.01, 0.1, 0.3, 0.5, 0.8, 0.97])
SHARES = [0.05, 0.25, 0.1, 0.1, 0.2, 0.1, 0.2]
ON_INDICES = torch.sigmoid(PATHS["ddpm_linear"]().index_to_log_sigma(torch.tensor([0, 1, 250, 500, 501, 998])))


def draw(sampler: TimestepSampler, size: int, first: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    return sampler.sample(GlobalBatch(first, size), torch.arange(first, first + size))


@pytest.mark.parametrize("name", DENSITIES)
@pytest.mark.parametrize("edges", [EDGES, ON_INDICES], ids=["plain", "indices"])
def test_masses_agree_with_what_is_sampled(name, edges):
    density, count = DENSITIES[name], 40_000
    masses = bin_masses(density, edges)
    assert masses.sum().item() == pytest.approx(1, abs=1e-15) and (masses >= 0).all()
    t, _ = draw(TimestepSampler(density, seed=1, spread="stratified"), count)
    bins = torch.bucketize(t, edges.float())
    # Every stratum but those cut by the two edges of a bin lies within one bin.
    assert ((torch.bincount(bins, minlength=7) / count - masses).abs() <= 2 / count).all()


def test_masses_are_the_distribution_s():
    log_sigma = torch.logit(EDGES.double()).numpy()
    expected = torch.from_numpy(stats.norm(-0.4, 1.2).cdf(log_sigma)).diff()
    torch.testing.assert_close(bin_masses(LogitNormal(-0.4, 1.2), EDGES)[1:-1], expected, rtol=0, atol=3e-7)
    torch.testing.assert_close(bin_masses(Uniform(), EDGES)[:-1].cumsum(0), EDGES.double(), rtol=0, atol=6e-8)


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("path", ["ddpm_linear", "ddpm_cosine"])
def test_an_index_on_an_edge_belongs_to_one_bin_whole(path, sampler):
    path = PATHS[path]()
    density = build_density(DenoisingConfig(timesteps=timesteps(sampler)), path)
    edges = path.index_to_t(torch.tensor([9, 499, 500])).float()
    masses = bin_masses(density, edges)
    last_of_bin = torch.tensor([9, 499, 500])
    of_index = density.cumulative.diff() if hasattr(density, "cumulative") else torch.full((1000,), 1e-3).double()
    expected = torch.stack([part.sum() for part in of_index.tensor_split(last_of_bin + 1)])
    torch.testing.assert_close(masses, expected, rtol=0, atol=1e-12)
    allocated = AllocatedTimesteps(density, seed=2, spread="stratified", edges=edges)
    allocated.set_shares([0.25, 0.25, 0.25, 0.25])
    t, _ = draw(allocated, 4000)
    index = path.t_to_index(t)
    counts = [((index > a) & (index <= b)).sum().item() for a, b in ((-1, 9), (9, 499), (499, 500), (500, 999))]
    assert counts == [1000] * 4
    torch.testing.assert_close(path.index_to_t(index).float(), t, rtol=0, atol=0)


@pytest.mark.parametrize("name", DENSITIES)
def test_shares_and_importance_hold_for_every_density(name):
    allocated = AllocatedTimesteps(DENSITIES[name], seed=3, spread="low_discrepancy", edges=EDGES)
    masses = allocated.masses
    shares = torch.where(masses > 0, torch.tensor(SHARES).double(), 0.0)
    shares = shares / shares.sum()
    allocated.set_shares(shares)
    count = 20_000
    t, importance = draw(allocated, count)
    bins = torch.bucketize(t, EDGES)
    assert ((torch.bincount(bins, minlength=7) - count * shares).abs() <= 1).all()
    torch.testing.assert_close(importance, (masses / shares).float()[bins], rtol=1e-6, atol=0)
    assert importance.double().mean().item() == pytest.approx(1, abs=20 / count * importance.max().item())


@pytest.mark.parametrize("spread", ["none", "stratified", "low_discrepancy"])
def test_timesteps_follow_the_density_within_each_bin_and_the_weighted_mean_is_the_density_s(spread):
    density, count = LogitNormal(-0.4, 1.0), 20_000
    allocated = AllocatedTimesteps(density, seed=4, spread=spread, edges=EDGES)
    allocated.set_shares(SHARES)
    t, importance = draw(allocated, count)
    bins = torch.bucketize(t, EDGES)
    below = torch.cat((torch.zeros(1), allocated.masses.cumsum(0)))
    quantiles = (density.distribution(torch.logit(t.double())) - below[bins]) / allocated.masses[bins]
    for k in range(7):
        assert stats.kstest(quantiles[bins == k], "uniform").pvalue > 1e-3
    for function in (torch.ones_like, torch.square, torch.log):
        wanted = function(density.quantile((torch.arange(10**6).double() + 0.5) / 10**6)).mean().item()
        products = importance.double() * function(t.double())
        assert abs(products.mean().item() - wanted) < 3 * products.std().item() / count**0.5
        if spread != "none":
            assert abs(products.mean().item() - wanted) < 0.3 * products.std().item() / count**0.5


@pytest.mark.parametrize("spread", ["none", "stratified", "low_discrepancy"])
def test_draws_do_not_depend_on_the_number_of_ranks_nor_on_earlier_shares(spread):
    density = DENSITIES["logit_normal x1 on ddpm_cosine"]
    allocated = AllocatedTimesteps(density, seed=7, spread=spread, edges=EDGES)
    allocated.set_shares(SHARES[::-1])
    draw(allocated, 96)
    allocated.set_shares(SHARES)
    batch, members = GlobalBatch(960, 96, 1), torch.arange(960, 1056)
    whole = allocated.sample(batch, members)
    for ranks in (2, 3, 8):
        parts = [allocated.sample(batch, members[rank::ranks]) for rank in range(ranks)]
        for which in (0, 1):
            for rank in range(ranks):
                assert torch.equal(parts[rank][which], whole[which][rank::ranks])


@pytest.mark.parametrize("name", DENSITIES)
def test_shares_equal_to_the_masses_draw_the_ordinary_timesteps(name):
    for spread in ("none", "low_discrepancy"):
        allocated = AllocatedTimesteps(DENSITIES[name], seed=8, spread=spread, edges=EDGES)
        t, importance = draw(allocated, 3000)
        assert torch.equal(t, draw(TimestepSampler(DENSITIES[name], 8, spread), 3000)[0])
        assert torch.equal(importance, torch.ones(3000))


def test_state_survives_json_to_the_last_bit():
    allocated = AllocatedTimesteps(LogitNormal(), seed=9, edges=EDGES)
    shares = torch.rand(7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    allocated.set_shares(shares / shares.sum())
    other = AllocatedTimesteps(LogitNormal(), seed=9, edges=EDGES)
    other.load_state_dict(json.loads(json.dumps(allocated.state_dict())))
    assert torch.equal(other.shares, allocated.shares)
    assert all(torch.equal(a, b) for a, b in zip(draw(other, 500), draw(allocated, 500), strict=True))
    fresh = AllocatedTimesteps(LogitNormal(), seed=9, edges=EDGES)
    fresh.load_state_dict({})
    assert torch.equal(fresh.shares, fresh.masses)
    with pytest.raises(ValueError, match="edges"):
        AllocatedTimesteps(LogitNormal(), seed=9, edges=EDGES[1:]).load_state_dict(allocated.state_dict())


def test_empty_bins_get_nothing():
    edges = torch.tensor([0.0, 0.5, 0.5, 1.0])
    allocated = AllocatedTimesteps(Uniform(), seed=10, edges=edges)
    assert allocated.masses.tolist() == pytest.approx([0, 0.5, 0, 0.5, 0], abs=1e-7)
    allocated.set_shares([0.0, 0.9, 0.0, 0.1, 0.0])
    t, importance = draw(allocated, 5000)
    assert set(torch.bucketize(t, edges).tolist()) == {1, 3} and t.min() > 0 and importance.max() <= 5.01
    allocated.set_shares([0.0, 0.9, 0.0, 0.1 - 1e-10, 0.0])
    allocated._quantiles = lambda batch, indices, drawn: torch.full(indices.shape, 1 - 2.0**-53, dtype=torch.float64)
    t, importance = draw(allocated, 1)
    assert torch.bucketize(t, edges).item() == 3 and importance.item() == pytest.approx(5, rel=1e-5)


def test_means_over_bins_are_integrals():
    found = bin_means(Uniform(), torch.tensor([0.2, 0.5]), lambda t: (1 - t) ** 2)
    ends = torch.tensor([0.0, 0.2, 0.5, 1.0]).double()
    expected = -((1 - ends) ** 3).diff() / (3 * ends.diff())
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
