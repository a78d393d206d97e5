"""Number of classes derived from labels, with a bound."""

from collections.abc import Callable

import numpy as np

from torchtitan.data.base import DatasetError

EXPECTED_CLASSES = 1000  # as many need no explanation


def num_classes_of(labels: np.ndarray, place: Callable[[int], str], advice: str) -> int:
    """Number of classes of a data set that does not declare them: the largest label and one.

    A label is a stray where it is twice as large as all smaller ones, and as EXPECTED_CLASSES: of the classes up to it
    almost all would have no image.

    Args:
        labels: int64 [N], N >= 1, none negative.
        place: name, in messages, of the image at a position.

    Raises:
        DatasetError: there is a stray; it is named with its place.
    """
    below = EXPECTED_CLASSES - 1
    for label in np.unique(labels[labels > below]).tolist():
        if label >= 2 * (below + 1):
            where = place(int(np.flatnonzero(labels == label)[0]))
            raise DatasetError(
                f"{where}: label {label} stands far beyond the others, and would make {int(labels.max()) + 1} classes "
                f"(mend it; {advice})"
            )
        below = label
    return int(labels.max()) + 1
