"""Search over rising batch sizes, a pure function of its callback."""

from bisect import bisect_right
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
