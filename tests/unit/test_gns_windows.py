"""Windows of the pooled steps: the same for all estimators, following the drift of the noise scale."""

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tests.unit.test_gns_pool import BINS, GEOMETRIES, made_up
from torchtitan.gns.decayed import WINDOW_SHARES, BinEstimates, DecayedSums, narrowest
from torchtitan.gns.pool import ESTIMATORS, Pool
from torchtitan.gns.statistics import PairSums

STEPS, RUNS, SAMPLES, DIM = 200, 10, 24, 30
FORMER = WINDOW_SHARES.index(0.25)  # the only window there was


def drifting(noise_scales: Tensor, seed: int, rare: Sequence[int] | None = None) -> DecayedSums:
    """Pool steps of given noise scales, [steps], the same in every bin; noise is 1, and the signal along an axis.

    With `rare` there is one more bin, which has two samples in each of these steps and none in others.
    """
    generator = torch.Generator().manual_seed(seed)
    pool = DecayedSums(RUNS if rare is None else RUNS + 1, math.inf, WINDOW_SHARES)
    for number, scale in enumerate(noise_scales.tolist()):
        gradients = torch.randn(RUNS, SAMPLES, DIM, generator=generator, dtype=torch.float64) / DIM**0.5
        gradients[..., 0] += scale**-0.5
        count = torch.full((RUNS,), float(SAMPLES), dtype=torch.float64)
        squares, products = gradients.square().sum((1, 2)), gradients.sum(1).square().sum(1)
        if rare is not None:
            of_rare = gradients[0, :2] if number in rare else gradients[0, :0]
            count, squares, products = (
                torch.cat((of_all, torch.as_tensor(of_bin, dtype=torch.float64).reshape(1))) for of_all, of_bin in (
                    (count, len(of_rare)), (squares, of_rare.square().sum()), (products, of_rare.sum(0).square().sum()),
                )
            )
        pool.add(PairSums(count, squares, products.diag(), (count * (count - 1.0).clamp_min(0.0)).diag()))
    return pool


def bias(found: BinEstimates, noise_scales: Tensor) -> float:
    """Mean of ln B over bins less that of the last fifth's true one, whose signals and noises are averaged apart."""
    last = noise_scales[-len(noise_scales) // 5 :]
    return (found.b_simple * (1.0 / last).mean()).log().mean().item()


@pytest.mark.parametrize("power", [2, 4])
def test_window_follows_a_noise_scale_that_rises_to_the_end(power):
    scales = 2.0 + 40.0 * (torch.arange(1, STEPS + 1, dtype=torch.float64) / STEPS) ** power
    pool = drifting(scales, seed=1)
    former, found = (pool.estimate(window=window) for window in (FORMER, pool.window()))
    assert bias(former, scales) < -0.2
    assert abs(bias(found, scales)) < 0.1
    assert (found.lag < former.lag).all()


@pytest.mark.parametrize("steps_between", [200, 40, 10])
def test_a_rare_bin_leaves_the_others_the_window_that_follows_the_drift(steps_between):
    scales = 2.0 + 40.0 * (torch.arange(1, STEPS + 1, dtype=torch.float64) / STEPS) ** 4
    without, pool = drifting(scales, seed=1, rare=()), drifting(scales, seed=1, rare=range(0, STEPS, steps_between))
    assert pool.window() == without.window() == drifting(scales, seed=1).window() > 0
    found, wanted = (each.estimate(window=each.window()).b_simple[:RUNS] for each in (pool, without))
    assert torch.equal(found, wanted)


def test_window_is_long_where_nothing_drifts():
    chosen = [drifting(torch.full((STEPS,), 20.0, dtype=torch.float64), seed).window() for seed in range(3)]
    assert max(chosen) <= 1  # at least half of the samples' half-life, mostly


def test_all_estimators_of_a_geometry_forget_at_the_same_pace():
    """Half after the same samples trained, whether all of them are measured (modulation) or a third (the others)."""
    half_life, every = 100.0, 3
    pool = Pool(BINS, GEOMETRIES, half_life)
    for step in range(1, 301):
        pool.add(made_up(step, measured=step % every == 0))
    of_entry = 8.0 * every
    for geometry in pool.geometries:
        kept = 0.5 ** (of_entry / (half_life * WINDOW_SHARES[pool.window(geometry)]))
        for estimator in ESTIMATORS:
            lag = pool.by_bin(geometry, estimator).lag
            # Of an endless run; what this one lacks weighs 0.5^24, and is 18 times as old.
            torch.testing.assert_close(lag, torch.full_like(lag, of_entry * kept / (1.0 - kept)), rtol=1e-5, atol=0)
            whole = pool.whole(geometry, estimator).lag
            torch.testing.assert_close(whole, lag[:1] * BINS, rtol=1e-5, atol=0)


def test_lag_is_the_mean_age_of_the_pairs():
    pool = DecayedSums(1, 50.0)
    for number, further in ((4.0, 0.0), (8.0, 10.0), (2.0, 100.0)):
        sums = PairSums.of_group(torch.tensor([number]), torch.tensor([1.0]), torch.tensor([[2.0]]))
        pool.add(sums, torch.tensor([number + further], dtype=torch.float64))
    ages, pairs = torch.tensor([120.0, 102.0, 0.0]), torch.tensor([12.0, 56.0, 2.0])
    weights = pairs * 0.5 ** (ages / 50.0)
    assert pool.estimate().lag.item() == pytest.approx(((weights * ages).sum() / weights.sum()).item())


def test_headline_has_the_fewest_unbounded_intervals_then_the_narrowest():
    def estimates(lower: list[float], upper: list[float]) -> BinEstimates:
        made = object.__new__(BinEstimates)
        values = {"lower": torch.tensor(lower), "upper": torch.tensor(upper), "unbounded": torch.tensor(upper).isinf()}
        made.__dict__.update(values)
        return made

    narrow, wide = estimates([9.0, 9.0], [11.0, 11.0]), estimates([5.0, 5.0], [20.0, 20.0])
    half = estimates([9.9, 9.9], [10.1, math.inf])
    assert narrowest({"sketch": wide, "composite": narrow}) == "composite"
    assert narrowest({"sketch": narrow, "composite": wide}) == "sketch"
    assert narrowest({"sketch": wide, "composite": half}) == "sketch"
