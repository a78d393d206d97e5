"""Critical batch size from held-out losses of branches: the largest batch without loss at equal samples.

Source: Merrill et al., "Critical Batch Size Revisited", arXiv 2505.23971: branches of a checkpoint at k times the batch
size, smoothed loss, tolerance 0.01.

Where most of a bin's loss is irreducible, a tolerance in per cent of the loss accepts any batch size. There the excess loss of a
batch size over the smallest one is divided by the decrease of the bin's loss that the smallest one's branches achieved.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from research.equal_samples import crossing
from torchtitan.statistics.interval import Interval, mean_interval

SHARE = 0.2  # of what a bin learned: the excess at which its batch size is read
# Held-out losses by batch size and seed; infinite for a branch that diverged, absent where there is none.
Losses = Mapping[int, Mapping[int, float]]


@dataclass(frozen=True)
class Excess:
    """Excess of a batch size's held-out loss over that of the smallest one, as ratio minus 1, paired by seed.

    Attributes:
        batch_size: global.
        by_seed: of each seed that has both branches; infinite where the branch diverged.
        mean: over seeds with its interval; NaN without any, infinite with a diverged branch.
    """

    batch_size: int
    by_seed: tuple[float, ...]
    mean: Interval

    @property
    def known(self) -> bool:
        return bool(self.by_seed)

    def verdict(self, tolerance: float) -> str:
        """Verdict: "within" or "beyond" the tolerance with confidence, else "undecided"; "missing" without branches."""
        if not self.known:
            return "missing"
        if self.mean.upper <= tolerance:
            return "within"
        return "beyond" if self.mean.lower > tolerance else "undecided"


@dataclass(frozen=True)
class CriticalBatch:
    """Critical batch size by a measurement, all in samples.

    Attributes:
        relation: "equal": `value` is within the tolerance and the next batch is not; "at least": nothing above
            `value` was beyond it; "below": the first batch above the smallest, `value`, is beyond it already (the
            smallest one itself is the reference, so it has no verdict); "unresolved": the
            branches learned less than the tolerance, so that any batch size would be within; "unknown": no losses.
        value: None for unresolved and unknown.
        lower: the largest batch up to which all are within with confidence; None where that is only the smallest one,
            the reference.
        upper: the smallest batch that is beyond with confidence, itself excluded; None: there is none.
        larger: a batch above `value` that is within although one below it is not: chance, or a rough landscape.
    """

    relation: str
    value: int | None = None
    lower: int | None = None
    upper: int | None = None
    larger: int | None = None


def excesses(losses: Losses, batch_sizes: Sequence[int], confidence: float = 0.95) -> list[Excess]:
    """Compare every batch size with the smallest one, paired by seed.

    Args:
        losses: of the existing branches.
        batch_sizes: of the test, rising; the first is the reference.
        confidence: of each interval (Student's t over seeds) by itself.
    """
    reference = {seed: loss for seed, loss in losses.get(batch_sizes[0], {}).items() if math.isfinite(loss)}
    found = []
    for batch_size in batch_sizes:
        of_batch = losses.get(batch_size, {})
        ratios = tuple(of_batch[seed] / reference[seed] - 1.0 for seed in sorted(reference) if seed in of_batch)
        mean = mean_interval(ratios, confidence)
        if batch_size == batch_sizes[0] and ratios:  # exactly 0 by definition, also with one seed
            mean = Interval(0.0, 0.0, 0.0, len(ratios))
        found.append(Excess(batch_size, ratios, mean))
    return found


def progress(start_loss: float, reference_losses: Sequence[float]) -> float:
    """Progress of training: start / reference - 1, the loss removed as a share of the smallest batch's loss."""
    finite = [loss for loss in reference_losses if math.isfinite(loss)]
    return start_loss / fmean(finite) - 1.0 if finite else math.nan


def critical_batch(found: Sequence[Excess], tolerance: float, learned: float = math.inf) -> CriticalBatch:
    """Decide the critical batch size.

    The batch sizes are gone through from the smallest up; the last one before the first whose mean excess is beyond
    the tolerance is the critical one.

    Args:
        found: excesses, of rising batch sizes, the first being the reference.
        tolerance: largest tolerated excess, > 0.
        learned: `progress` of the same losses.
    """
    if not found[0].known or math.isnan(learned):
        return CriticalBatch("unknown")
    if learned <= tolerance:
        return CriticalBatch("unresolved")
    last = 0
    while last + 1 < len(found) and found[last + 1].known and found[last + 1].mean.value <= tolerance:
        last += 1
    verdicts = [excess.verdict(tolerance) for excess in found]
    sure = next((place for place, verdict in enumerate(verdicts) if verdict != "within"), len(found)) - 1
    beyond = [excess.batch_size for excess, verdict in zip(found, verdicts, strict=True) if verdict == "beyond"]
    larger = [excess.batch_size for excess in found[last + 1 :] if excess.known and excess.mean.value <= tolerance]
    relation, value = "equal", found[last].batch_size
    if last + 1 == len(found) or not found[last + 1].known:
        relation = "at least"
    elif last == 0:
        relation, value = "below", found[1].batch_size
    lower = found[sure].batch_size if sure > 0 else None
    return CriticalBatch(relation, value, lower, min(beyond, default=None), max(larger, default=None))


def ratio_to_estimate(critical: CriticalBatch, estimate: Interval) -> Interval | None:
    """Ratio of the critical batch size to a noise scale; None where either is unknown.

    Both intervals at their worst together, so it covers at least as often as each of them.

    Args:
        critical: of the branches.
        estimate: the noise scale; its upper end may be infinite.
    """
    if critical.value is None or not estimate.value > 0:
        return None
    highest = math.inf if critical.upper is None or not estimate.lower > 0 else critical.upper / estimate.lower
    lowest = critical.lower / estimate.upper if critical.lower is not None and estimate.upper > 0 else 0.0
    return Interval(critical.value / estimate.value, lowest, highest)


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
