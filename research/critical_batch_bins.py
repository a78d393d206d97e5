"""Branch tests by timestep bin: excess losses as shares of what each bin learned.

Where most of a bin's loss is irreducible, a tolerance in per cent of the loss accepts any batch size. Here the excess loss of a
batch size over the smallest one is divided by the decrease of the bin's loss that the smallest one's branches achieved.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from research.critical_batch_decision import Losses
from research.equal_samples import crossing
from torchtitan.statistics.interval import Interval, mean_interval

SHARE = 0.2  # of what a bin learned: the excess at which its batch size is read


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


def _whole_seeds(losses: Losses, sizes: Sequence[int]) -> list[int]:
    """Seeds that have a branch of every batch size and a finite loss at the smallest one."""
    shared = set.intersection(*(set(losses.get(size, {})) for size in sizes))
    return sorted(seed for seed in shared if math.isfinite(losses[sizes[0]][seed]))


def _batch_at(sizes: Sequence[int], shares: Sequence[float]) -> float:
    """Batch size at which the shares first reach SHARE, linear in ln B between two sizes; infinite where none does."""
    for place in range(1, len(sizes)):
        if shares[place] < SHARE:
            continue
        if math.isinf(shares[place]):  # the branch diverged: somewhere above the size before
            return math.sqrt(sizes[place - 1] * sizes[place])
        return crossing((sizes[place - 1], shares[place - 1]), (sizes[place], shares[place]), SHARE)
    return math.inf
