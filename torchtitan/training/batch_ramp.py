"""Batch sizes that grow in a run: a fixed ramp of doublings, and the learning rate of a grown batch."""

import itertools
import math
from collections.abc import Iterator, Sequence

_MOST_DOUBLINGS = 20  # a million times the first batch


def ramp_factor(doublings: Sequence[int], images: int) -> int:
    """Multiple of the first global batch size after a number of images: 2 to the number of doublings passed.

    Args:
        doublings: numbers of images after which the batch doubles, rising.
        images: trained before the step.
    """
    return 2 ** sum(images >= passed for passed in doublings)


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
