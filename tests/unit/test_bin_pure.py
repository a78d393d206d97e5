"""Bin-pure microbatches: which bin each holds, and that the mean over many of them is the density's."""

import pytest
import torch

from tests.objectives import timesteps
from torchtitan.diffusion.denoising import DenoisingConfig
from torchtitan.diffusion.paths import PATHS
from torchtitan.diffusion.timesteps.bin_pure import BinPureTimesteps
from torchtitan.diffusion.timesteps.placement import Shifted
from torchtitan.diffusion.timesteps.registry import build_density
from torchtitan.diffusion.timesteps.sampler import (
    CosMap,
    GlobalBatch,
    LogitNormal,
    Mode,
    TimestepSampler,
    Uniform,
    UniformIndex,
)


def on_path(path: str, sampler: str, **settings):
    return build_density(DenoisingConfig(path=path, timesteps=timesteps(sampler), **settings), PATHS[path]())


EDGES = [0.1, 0.3, 0.35, 0.8]
DENSITIES = {
    "uniform": Uniform(),
    "logit-normal": LogitNormal(-0.4, 1.0),
    "lognormal sigma": LogitNormal(-1.2, 1.2),
    "mode": Mode(1.29),
    "cosmap": CosMap(),
    "shifted cosmap": Shifted(CosMap(), 3.0),
    "real index": on_path("ddpm_cosine_continuous", "uniform"),
    "intervals of indices": UniformIndex(PATHS["ddpm_linear"]()),
    "index": on_path("ddpm_linear", "uniform"),
    "shifted index": on_path("ddpm_cosine", "uniform", shift=2.0),
    "logit-normal on real indices": on_path("ddpm_linear_continuous", "logit_normal"),
    "logit-normal on indices": on_path("ddpm_linear", "logit_normal"),
    "mode on indices": on_path("ddpm_cosine", "mode"),
}
WITH_INDICES = {"index": "ddpm_linear", "shifted index": "ddpm_cosine", "logit-normal on indices": "ddpm_linear"}


def bin_pure(density=DENSITIES["logit-normal"], *, edges=EDGES, microbatches=6, seed=7, **settings) -> BinPureTimesteps:
    edges = torch.tensor(edges, dtype=torch.float64)
    return BinPureTimesteps(density, seed, edges=edges, microbatches_per_step=microbatches, **settings)


def step_batch(step: int, size: int = 48, attempt: int = 0) -> GlobalBatch:
    return GlobalBatch(step * size, size, attempt)


def whole_step(sampler: TimestepSampler, batch: GlobalBatch) -> tuple[torch.Tensor, torch.Tensor]:
    return sampler.sample(batch, torch.arange(batch.first_sample, batch.first_sample + batch.size))


@pytest.mark.parametrize("name", DENSITIES)
def test_every_microbatch_holds_one_bin_on_every_rank(name):
    ranks, local_batch, microbatches = 4, 2, 6
    sampler = bin_pure(DENSITIES[name], microbatches=microbatches)
    seen = set()
    for step in range(15):
        batch = step_batch(step, ranks * local_batch * microbatches)
        for microbatch in range(microbatches):
            number = sampler.bin_of_microbatch(batch, microbatch)
            for rank in range(ranks):
                first = batch.first_sample + (microbatch * ranks + rank) * local_batch
                t, importance = sampler.sample(batch, torch.arange(first, first + local_batch))
                # As the trainer finds the bin of a sample.
                assert torch.bucketize(t, sampler.edges).tolist() == [number] * local_batch
                torch.testing.assert_close(importance, (5 * sampler.masses[number]).float().expand(local_batch))
            seen.add(number)
    assert seen == set(range(5))


@pytest.mark.parametrize("microbatches", [1, 3, 5, 7])
def test_every_cycle_visits_every_bin_once_in_an_order_of_its_own(microbatches):
    sampler = bin_pure(microbatches=microbatches)
    order = [
        sampler.bin_of_microbatch(step_batch(step), number) for step in range(60) for number in range(microbatches)
    ]
    cycles = [tuple(order[first : first + 5]) for first in range(0, len(order), 5)]
    assert all(sorted(cycle) == [0, 1, 2, 3, 4] for cycle in cycles)
    assert len(set(cycles)) > 10
    other = bin_pure(microbatches=microbatches, seed=8)
    assert [other.bin_of_microbatch(step_batch(step), 0) for step in range(60)] != order[::microbatches]


def test_the_bin_does_not_depend_on_the_attempt_but_the_timesteps_do():
    sampler = bin_pure()
    for step in range(10):
        first, again = step_batch(step), step_batch(step, attempt=1)
        bins = [[sampler.bin_of_microbatch(batch, number) for number in range(6)] for batch in (first, again)]
        assert bins[0] == bins[1]
        assert not (whole_step(sampler, first)[0] == whole_step(sampler, again)[0]).any()


@pytest.mark.parametrize("name", DENSITIES)
def test_weighted_means_are_those_of_the_density(name):
    density, steps, batch = DENSITIES[name], 200, 300
    sampler = bin_pure(density, microbatches=5)  # a step is a cycle, so that steps are independent
    drawn = [whole_step(sampler, step_batch(step, batch)) for step in range(steps)]
    t, importance = (torch.stack(parts).double() for parts in zip(*drawn, strict=True))  # [steps, batch]
    quantiles = (torch.arange(500_000, dtype=torch.float64) + 0.5) / 500_000
    reference = density.quantile(quantiles)
    functions = {
        "one": torch.ones_like, "t": lambda t: t, "square": torch.square, "wave": lambda t: torch.sin(20 * t),
        "tail": lambda t: (t < 0.2).double(), "log": lambda t: torch.log(t + 1e-3),
    }
    for label, function in functions.items():
        means = (importance * function(t)).mean(1)
        error = means.std() / steps**0.5
        # Of 78 such comparisons one in five runs would exceed 3 standard errors by chance, one in 200 exceeds 4.
        assert abs(means.mean() - function(reference).mean()) <= 4 * error + 1e-6, label


def test_masses_and_law_within_a_bin_are_those_of_a_closed_form():
    sampler = bin_pure(Uniform(), microbatches=5)
    torch.testing.assert_close(
        sampler.masses, torch.tensor([0.1, 0.2, 0.05, 0.45, 0.2], dtype=torch.float64), rtol=0, atol=1e-7
    )
    edges = torch.tensor([0.0, *EDGES, 1.0])
    places = []
    for step in range(500):
        t, _ = whole_step(sampler, step_batch(step, 60))
        bins = torch.bucketize(t, sampler.edges)
        places.append((t - edges[bins]) / (edges[bins + 1] - edges[bins]))
    places = torch.cat(places).sort().values
    # Kolmogorov-Smirnov against the uniform distribution, at the 0.1 % level.
    distance = (places - (torch.arange(len(places)) + 0.5) / len(places)).abs().max()
    assert distance <= 1.95 / len(places) ** 0.5


@pytest.mark.parametrize("name", WITH_INDICES)
def test_every_index_is_in_one_bin_where_edges_cut_its_interval(name):
    path, density = PATHS[WITH_INDICES[name]](), DENSITIES[name]
    # At an index's own time, just below it, between two indices, and on the end of an interval.
    at, between, on_end = path.index_to_t(torch.tensor([100.0, 250.3, 400.5])).tolist()
    below = torch.nextafter(path.index_to_t(torch.tensor([600.0])).float(), torch.tensor(0.0)).item()
    sampler = bin_pure(density, edges=[at, between, on_end, below], microbatches=1)
    bins_of_index: dict[int, set[int]] = {}
    for step in range(300):
        t, _ = whole_step(sampler, step_batch(step, 512))
        number = sampler.bin_of_microbatch(step_batch(step, 512), 0)
        for index in path.t_to_index(t).unique().tolist():
            bins_of_index.setdefault(index, set()).add(number)
    assert all(len(bins) == 1 for bins in bins_of_index.values())
    assert len(bins_of_index) > 900
    time_of = path.index_to_t(torch.arange(1000)).float()
    expected = torch.bucketize(time_of, sampler.edges)
    assert all(bins == {expected[index].item()} for index, bins in bins_of_index.items())
    # The mass of a bin is that of whole indices.
    log_sigma_middles = path.index_to_log_sigma(torch.arange(1000))
    widths = path.index_to_log_sigma(torch.arange(1001) - 0.5).diff()
    mass_of_index = density.log_sigma_density(log_sigma_middles) * widths
    of_bins = torch.zeros(5, dtype=torch.float64).index_add(0, expected, mass_of_index)
    torch.testing.assert_close(sampler.masses, of_bins, rtol=0, atol=1e-12)


def test_draws_do_not_depend_on_the_number_of_ranks():
    sampler, batch, microbatches = bin_pure(microbatches=3), step_batch(5), 3
    whole, _ = whole_step(sampler, batch)
    for ranks in (1, 2, 4, 8):
        local_batch = batch.size // microbatches // ranks
        parts = [
            sampler.sample(batch, torch.arange(first, first + local_batch))[0]
            for first in range(batch.first_sample, batch.first_sample + batch.size, local_batch)
        ]
        assert len(parts) == ranks * microbatches and torch.equal(torch.cat(parts), whole)
    scattered = torch.tensor([batch.first_sample + place for place in (47, 0, 13, 14)])
    assert torch.equal(sampler.sample(batch, scattered)[0], whole[[47, 0, 13, 14]])


def test_one_bin_is_the_ordinary_sampler():
    sampler, ordinary = bin_pure(edges=[]), TimestepSampler(LogitNormal(-0.4, 1.0), 7)
    for expected, found in zip(whole_step(ordinary, step_batch(3)), whole_step(sampler, step_batch(3)), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("spread", ["stratified", "low_discrepancy"])
def test_spreads_that_relate_ranks_are_refused(spread):
    with pytest.raises(ValueError, match=f"objective.spread = {spread}"):
        bin_pure(spread=spread)


@pytest.mark.parametrize(("density", "edges"), [
    (Uniform(), [0.3, 0.2]), (Uniform(), [0.3, 0.3]), (Uniform(), [0.0, 0.5]), (DENSITIES["index"], [0.5, 0.5 + 1e-7]),
])
def test_bins_that_hold_no_timesteps_are_refused(density, edges):
    with pytest.raises(ValueError, match="each needs some"):
        bin_pure(density, edges=edges)
