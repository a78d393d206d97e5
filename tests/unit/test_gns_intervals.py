"""Intervals of ratios: against their definition, and how often they hold the truth."""

import math

import pytest
import torch
from torch import Tensor

from torchtitan.gns.decayed import BinEstimates, DecayedSums
from torchtitan.gns.statistics import PairSums
from torchtitan.statistics.ratio_intervals import fieller

GRID = torch.linspace(-50.0, 200.0, 250_001, dtype=torch.float64)


def interval(*values: float) -> tuple[float, float, bool]:
    lower, upper, unbounded = (end.item() for end in fieller(*(torch.tensor(v, dtype=torch.float64) for v in values)))
    return lower, upper, bool(unbounded)


def in_fieller_set(n: float, d: float, var_n: float, var_d: float, covariance: float, quantile: float) -> Tensor:
    return (n - GRID * d) ** 2 <= quantile**2 * (var_n - 2 * GRID * covariance + GRID**2 * var_d)


@pytest.mark.parametrize("n, d", [(10.0, 1.0), (1.0, 2.0), (0.1, 1.0), (-3.0, 1.0)])
@pytest.mark.parametrize("covariance", [-0.05, 0.0, 0.05])
def test_bounded_set_is_fiellers(n: float, d: float, covariance: float) -> None:
    values = (n, d, 0.1, 0.1, covariance, 2.0)
    lower, upper, unbounded = interval(*values)
    assert not unbounded
    assert torch.equal((GRID >= lower) & (GRID <= upper), in_fieller_set(*values))


@pytest.mark.parametrize("d", [0.6, 0.2, 0.0])
@pytest.mark.parametrize("covariance", [-0.05, 0.0, 0.05])
def test_weak_denominator_leaves_only_a_lower_bound(d: float, covariance: float) -> None:
    values = (3.0, d, 0.1, 0.1, covariance, 2.0)
    lower, upper, unbounded = interval(*values)
    positive = GRID > 0
    assert unbounded is True and upper == math.inf
    assert torch.equal((GRID >= lower)[positive], in_fieller_set(*values)[positive])


def test_negative_denominator_counts_as_zero_and_no_knowledge_is_the_whole_line() -> None:
    assert interval(3.0, -5.0, 0.1, 0.1, 0.0, 2.0) == interval(3.0, 0.0, 0.1, 0.1, 0.0, 2.0)
    for values in (
        (0.1, 0.1, 0.1, 0.1, 0.0, 2.0),
        (1.0, 1.0, math.inf, math.inf, 0.0, 2.0),
        (1.0, math.nan, 1, 1, 0, 2),
    ):
        assert interval(*values) == (-math.inf, math.inf, True)
    assert interval(1.0, 1.0, 1e-4, 1e-4, 0.0, math.inf) == (-math.inf, math.inf, True)


# ---------------------------------------------------------------------- coverage

DIM, SAMPLES_PER_STEP, TRIALS_AT_ONCE = 200, 25.0, 250
NOISE_SCALES = (10.0, 100.0, 300.0)


class Steps:
    """Independent runs as bins: the same draws of noise, tr Sigma = 1, with each noise scale's |G|^2 along one axis."""

    def __init__(self, tails: str, seed: int) -> None:
        self.tails, self.generator = tails, torch.Generator().manual_seed(seed)

    def draw(self, noise_scales: tuple[float, ...]) -> list[PairSums]:
        """One step of every run, for each noise scale; counts are Poisson, effective dimension 200."""
        count = torch.poisson(torch.full((TRIALS_AT_ONCE,), SAMPLES_PER_STEP), generator=self.generator)
        most = int(count.max())
        noise = torch.randn(TRIALS_AT_ONCE, most, DIM, generator=self.generator)
        scale = torch.full((TRIALS_AT_ONCE, most), DIM**-0.5)
        if self.tails == "heavy":  # mixed over an exponential distribution of variances: Laplace
            scale *= torch.empty(TRIALS_AT_ONCE, most).exponential_(generator=self.generator).sqrt()
        noise *= (scale * (torch.arange(most) < count[:, None]))[..., None]
        squares, total = noise.square().sum((1, 2), dtype=torch.float64), noise.sum(1, dtype=torch.float64)
        return [self._with_mean(1.0 / scale, count.double(), squares, total) for scale in noise_scales]

    @staticmethod
    def _with_mean(signal: float, count: Tensor, squares: Tensor, total: Tensor) -> PairSums:
        length = math.sqrt(signal)
        moved = torch.cat([total[:, :1] + length * count[:, None], total[:, 1:]], dim=1)
        squares = squares + 2.0 * length * total[:, 0] + signal * count
        return PairSums.of_group(count, squares, moved.square().sum(1).diag())


def run(tails: str, noise_scale: float, steps: int, seed: int) -> BinEstimates:
    source, pool = Steps(tails, seed), DecayedSums(TRIALS_AT_ONCE, math.inf)
    for _ in range(steps):
        pool.add(source.draw((noise_scale,))[0])
    return pool.estimate()


def covered(estimates: BinEstimates, truth: float) -> Tensor:
    return (estimates.lower <= truth) & (truth <= estimates.upper)


def test_weak_signal_is_flagged_unbounded_and_its_lower_bound_holds() -> None:
    estimates = run("gauss", 10_000.0, steps=15, seed=1)
    assert estimates.unbounded.double().mean() > 0.9
    assert estimates.upper[estimates.unbounded].isinf().all()
    assert (estimates.signal < 0).any() and (estimates.lower > 10.0).all()
    assert (estimates.b_simple[estimates.signal < 0] < 0).all()
    assert covered(estimates, 10_000.0).double().mean() > 0.92


def test_strong_signal_is_bounded_and_covered() -> None:
    estimates = run("gauss", 30.0, steps=15, seed=2)
    assert not estimates.unbounded.any()
    assert 0.90 < covered(estimates, 30.0).double().mean() < 0.99


@pytest.mark.long
@pytest.mark.parametrize("tails", ["gauss", "heavy"])
def test_intervals_hold_the_truth_as_often_as_they_say(tails: str) -> None:
    """Nominal 95 % intervals of 2,000 runs a cell: 40 steps and 100 equally weighted, 100 with half-life 20 steps."""
    half_life = 20.0 * SAMPLES_PER_STEP
    cells: dict[tuple[float, int, str], list[BinEstimates]] = {}
    for chunk in range(8):
        source = Steps(tails, seed=100 + chunk)
        pools = {
            (scale, life): DecayedSums(TRIALS_AT_ONCE, life) for scale in NOISE_SCALES for life in (math.inf, half_life)
        }
        for number in range(1, 101):
            for scale, sums in zip(NOISE_SCALES, source.draw(NOISE_SCALES), strict=True):
                for life in (math.inf, half_life):
                    pools[scale, life].add(sums)
            if number in (40, 100):
                for (scale, life), pool in pools.items():
                    if number == 100 or life == math.inf:
                        weights = "equal" if life == math.inf else "half-life 20"
                        cells.setdefault((scale, number, weights), []).append(pool.estimate())
    outside = []
    print(f"\n| {tails}: noise scale | steps | weights | covered % | truth below % | truth above % | unbounded % |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for (scale, number, weights), estimates in sorted(cells.items()):
        shares = [
            100.0 * torch.cat(parts).double().mean().item()
            for parts in (
                [covered(e, scale) for e in estimates],
                [scale < e.lower for e in estimates],
                [scale > e.upper for e in estimates],
                [e.unbounded for e in estimates],
            )
        ]
        print(f"| {scale:g} | {number} | {weights} | " + " | ".join(f"{share:.1f}" for share in shares) + " |")
        if not 92.0 <= shares[0] <= 97.0:
            outside.append((scale, number, weights, shares[0]))
    assert not outside
