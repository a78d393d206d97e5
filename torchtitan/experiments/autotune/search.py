"""Searches over rising batch sizes, as pure functions of their callbacks."""

import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence


def largest_fitting(candidates: Sequence[int], guess: int, fits: Callable[[int], bool]) -> int | None:
    """Find the largest batch size that fits, assuming that all below one that fits do so too.

    From the guess it doubles while it fits, or halves until it does, and then bisects between the two: about
    2 log2(answer / guess) tries from a guess that is too low, and log2 of the gap from one within a factor of 2.

    Args:
        candidates: rising batch sizes, one or more.
        guess: start; the largest candidate up to it is tried first.
        fits: tries a batch size; called at most once for each.

    Returns:
        the largest candidate that fits, None if the smallest does not.
    """
    start = max(bisect_right(candidates, guess) - 1, 0)
    if fits(candidates[start]):
        good, bad = _grow(candidates, start, fits)
    else:
        good, bad = _shrink(candidates, start, fits)
    if good < 0:
        return None
    while bad - good > 1:
        middle = (good + bad) // 2
        if fits(candidates[middle]):
            good = middle
        else:
            bad = middle
    return candidates[good]


def doublings(candidates: Sequence[int]) -> list[int]:
    """Doublings: the smallest candidate, and each time the first that is at least twice as large."""
    ladder, place = [], 0
    while place < len(candidates):
        ladder.append(candidates[place])
        place = bisect_left(candidates, 2 * candidates[place])
    return ladder


def fastest(
    ladder: Sequence[int], rate: Callable[[int, int], float | None], *, tolerance: float = 0.03, repeats: int = 3
) -> int | None:
    """Find the knee of the throughput: the smallest batch size that is nearly as fast as the fastest.

    The ladder is climbed until a batch size does not fit. Those whose median rate is within twice the tolerance of
    the best are then measured again, since chance might decide between them, until each has `repeats` measurements.

    Args:
        ladder: rising batch sizes, one or more.
        rate: images per second of a batch size in its repeat 0, 1, ...; None where it does not fit.
        tolerance: share of the best rate that a smaller batch size may lack, 0 < tolerance < 0.5.
        repeats: measurements of a batch size that is close to the best.

    Returns:
        the smallest batch size whose median rate is at least (1 - tolerance) of the best; None if none fits.
    """
    rates: dict[int, list[float]] = {}
    for batch_size in ladder:
        first = rate(batch_size, 0)
        if first is None:
            break
        rates[batch_size] = [first]
    while open_questions := [size for size in _within(rates, 2 * tolerance) if len(rates[size]) < repeats]:
        if len(_within(rates, 2 * tolerance)) == 1:
            break  # nothing comes near it
        for batch_size in open_questions:
            again = rate(batch_size, len(rates[batch_size]))
            if again is None:
                del rates[batch_size]
            else:
                rates[batch_size].append(again)
    return min(_within(rates, tolerance), default=None)


def _within(rates: dict[int, list[float]], tolerance: float) -> list[int]:
    medians = {batch_size: statistics.median(values) for batch_size, values in rates.items()}
    least = (1 - tolerance) * max(medians.values(), default=0.0)
    return [batch_size for batch_size, median in medians.items() if median >= least]


def _grow(candidates: Sequence[int], good: int, fits: Callable[[int], bool]) -> tuple[int, int]:
    while good < len(candidates) - 1:
        following = max(bisect_right(candidates, 2 * candidates[good]) - 1, good + 1)
        if not fits(candidates[following]):
            return good, following
        good = following
    return good, len(candidates)


def _shrink(candidates: Sequence[int], bad: int, fits: Callable[[int], bool]) -> tuple[int, int]:
    while bad > 0:
        preceding = min(max(bisect_right(candidates, candidates[bad] // 2) - 1, 0), bad - 1)
        if fits(candidates[preceding]):
            return preceding, bad
        bad = preceding
    return -1, bad
