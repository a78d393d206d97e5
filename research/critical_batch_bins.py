"""Branch tests by timestep bin: excess losses as shares of what each bin learned, and their ranking by noise scale.

Where most of a bin's loss is irreducible, a tolerance in per cent of the loss accepts any batch size. Here the excess loss of a
batch size over the smallest one is divided by the decrease of the bin's loss that the smallest one's branches achieved.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from research.critical_batch_decision import Losses
from research.equal_samples import crossing
from research.gns_calibration_statistics import percentile_interval
from research.rank_correlation import spearman
from torchtitan.statistics.interval import Interval, mean_interval

SHARE = 0.2  # of what a bin learned: the excess at which its batch size is read
LEAST_BINS = 3  # of a rank correlation
_RESAMPLES = 1000


@dataclass(frozen=True)
class BinTest:
    """Branch test of one bin.

    Attributes:
        place: number of the bin.
        learned: loss of the checkpoint minus that of the smallest batch's branches, over seeds.
        shares: excess of each batch size over the smallest as a share of `learned`, over seeds, infinite where a branch
            diverged; the first is 0. Empty where `learned` is not above 0 with its interval.
        batch_size: in samples, at which the mean share reaches SHARE; infinite where it does not, NaN without shares.
    """

    place: int
    learned: Interval
    shares: tuple[Interval, ...]
    batch_size: float


def bin_test(place: int, losses: Losses, sizes: Sequence[int], start: float) -> BinTest:
    """Test of a bin.

    Args:
        place: number of the bin.
        losses: of the branches, by batch size and seed.
        sizes: rising; the first is the reference.
        start: loss of the checkpoint.
    """
    seeds = _whole_seeds(losses, sizes)
    learned = mean_interval([start - losses[sizes[0]][seed] for seed in seeds])
    if not learned.lower > 0 or not learned.bounded:
        return BinTest(place, learned, (), math.nan)
    shares = [
        mean_interval([(losses[size][seed] - losses[sizes[0]][seed]) / learned.value for seed in seeds]) for size in sizes
    ]
    return BinTest(place, learned, tuple(shares), _batch_at(sizes, [share.value for share in shares]))


def rank_by_noise(
    tests: Sequence[BinTest], losses: Sequence[Losses], starts: Sequence[float], sizes: Sequence[int], scales: Mapping[int, float]
) -> tuple[Interval, int]:
    """Spearman's correlation over bins of the batch size of a `BinTest` with the bin's noise scale.

    Args:
        tests: of all bins.
        losses, starts: of all bins, as of `bin_test`.
        sizes: rising.
        scales: number of a bin -> its noise scale in samples; bins without one, or without a batch size, are left out.

    Returns:
        correlation with the 95 % percentiles of resamples of seeds, NaN under LEAST_BINS bins or where either is constant; number
        of bins.
    """
    used = [test.place for test in tests if not math.isnan(test.batch_size) and test.place in scales]
    if len(used) < LEAST_BINS:
        return Interval(math.nan), len(used)
    noise = np.array([scales[place] for place in used])
    value = _rank(np.array([tests[place].batch_size for place in used]), noise)
    found = []
    for of_seeds in _resampled(_whole_seeds(losses[used[0]], sizes)):
        batches = np.array([_of_resample(losses[place], starts[place], sizes, of_seeds) for place in used])
        found.append(_rank(batches[~np.isnan(batches)], noise[~np.isnan(batches)]))
    known = [rank for rank in found if math.isfinite(rank)]
    if not known or not math.isfinite(value):
        return Interval(value), len(used)
    return percentile_interval(np.array([value, *known])), len(used)


def _whole_seeds(losses: Losses, sizes: Sequence[int]) -> list[int]:
    """Seeds that have a branch of every batch size and a finite loss at the smallest one."""
    shared = set.intersection(*(set(losses.get(size, {})) for size in sizes))
    return sorted(seed for seed in shared if math.isfinite(losses[sizes[0]][seed]))


def _resampled(seeds: Sequence[int]) -> Iterator[list[int]]:
    generator = np.random.default_rng(0)
    for _ in range(_RESAMPLES):
        yield [seeds[place] for place in generator.integers(len(seeds), size=len(seeds))]


def _of_resample(losses: Losses, start: float, sizes: Sequence[int], seeds: Sequence[int]) -> float:
    reference = fmean(losses[sizes[0]][seed] for seed in seeds)
    if not start > reference:
        return math.nan
    means = [fmean(losses[size][seed] for seed in seeds) for size in sizes]
    return _batch_at(sizes, [(mean - reference) / (start - reference) for mean in means])


def _batch_at(sizes: Sequence[int], shares: Sequence[float]) -> float:
    """Batch size at which the shares first reach SHARE, linear in ln B between two sizes; infinite where none does."""
    for place in range(1, len(sizes)):
        if shares[place] < SHARE:
            continue
        if math.isinf(shares[place]):  # the branch diverged: somewhere above the size before
            return math.sqrt(sizes[place - 1] * sizes[place])
        return crossing((sizes[place - 1], shares[place - 1]), (sizes[place], shares[place]), SHARE)
    return math.inf


def _rank(batches: np.ndarray, noise: np.ndarray) -> float:
    if len(batches) < LEAST_BINS:
        return math.nan
    return float(spearman(np.minimum(batches, np.finfo(float).max), noise, np.ones(len(batches))))
