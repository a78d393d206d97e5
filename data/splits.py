"""Splits: held-out images of a dataset without a validation part."""

import numpy as np

from torchtitan.data.base import DatasetError, Split


def last_of_each_class(classes: np.ndarray, fraction: float) -> np.ndarray:
    """Hold out the last images of each class.

    Args:
        classes: of each image, int32 [N], in ascending order.
        fraction: share of all, 0 <= f < 1.

    Returns:
        held-out mask, bool [N]: floor(f x their images) of the first k classes together, for every k, so that every
        class gives its share to within one image.
    """
    ends = np.searchsorted(classes, np.arange(classes[-1] + 1), side="right")
    starts = np.concatenate(([0], ends[:-1]))
    given = np.floor(ends * fraction + 1e-9).astype(np.int64)  # a product may end just below a whole number
    counts = np.diff(given, prepend=0)
    first_held_out = np.maximum(ends - counts, starts)
    return np.arange(len(classes)) >= first_held_out[classes]


def spread_evenly(count: int, fraction: float) -> np.ndarray:
    """Hold out image i of `count` where floor((i + 1) f) > floor(i f), f = `fraction`; bool [count]."""
    # A product may end just below a whole number.
    return np.diff(np.floor(np.arange(count + 1) * fraction + 1e-9)) > 0


def split_positions(count: int, split: Split, fraction: float) -> np.ndarray:
    """Positions of a split of `count` images that `spread_evenly` divides. Raises DatasetError: there are none."""
    held_out = spread_evenly(count, fraction)
    return chosen_positions(held_out if split == "validation" else ~held_out, split, fraction)


def chosen_positions(chosen: np.ndarray, split: Split, fraction: float) -> np.ndarray:
    """Positions of a split where its bool [N] is true. Raises DatasetError where it is nowhere."""
    positions = np.flatnonzero(chosen)
    if len(positions) == 0:
        raise DatasetError(f"data.validation_fraction: {fraction} leaves no image for {split}")
    return positions
