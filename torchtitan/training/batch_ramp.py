"""Batch sizes that grow in a run: a fixed ramp of doublings, and the learning rate of a grown batch."""

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

_MOST_DOUBLINGS = 20  # a million times the first batch


def ramp_factor(doublings: Sequence[int], images: int) -> int:
    """Multiple of the first global batch size after a number of images: 2 to the number of doublings passed.

    Args:
        doublings: numbers of images after which the batch doubles, rising.
        images: trained before the step.
    """
    return 2 ** sum(images >= passed for passed in doublings)


def ramp_steps(doublings: Sequence[int], batch_size: int, steps: int) -> Counter[int]:
    """Number of optimizer steps of a ramp by multiple of the first batch size; the last step has the images that are left.

    Args:
        doublings: as of `ramp_factor`.
        batch_size: the first global batch size.
        steps: of the first batch size, of the whole run.
    """
    counts: Counter[int] = Counter()
    progress = 0  # in steps of the first batch size
    while progress < steps:
        factor = min(ramp_factor(doublings, progress * batch_size), steps - progress)
        end = min([steps, *(-(-images // batch_size) for images in doublings if images > progress * batch_size)])
        number = max(1, min(-(-(end - progress) // factor), (steps - progress) // factor))
        counts[factor] += number
        progress += number * factor
    return counts


def largest_growth(config: Any) -> int:
    """Largest multiple of the first global batch size that a step may come to have; 1 where the batch does not grow.

    Args:
        config: a JobConfig, or a view of one.
    """
    return 2 ** len(config.training.double_batch_after)


def completed(interval: int, before: int, after: int) -> bool:
    """Whether an interval ends within a step, or between two.

    Args:
        interval, before, after: in steps of the first batch size.
    """
    return after // interval > before // interval


def lr_multiple(factor: int) -> float:
    """Multiple of Adam's learning rate at a batch `factor` times as large: the square root (Malladi et al., "On the SDEs and
    scaling rules for adaptive gradient algorithms", arXiv 2205.10287).
    """
    return math.sqrt(factor)


def ramp_problems(doublings: Sequence[int]) -> Iterator[str]:
    """Find what is wrong with a ramp."""
    if len(doublings) > _MOST_DOUBLINGS:
        yield f"has {len(doublings)} doublings (give {_MOST_DOUBLINGS} at most)"
    if any(images < 1 for images in doublings) or any(a >= b for a, b in itertools.pairwise(doublings)):
        yield "must be numbers of images from 1 up, each above the one before"
