"""Files of one NumPy array, from any source."""

import tokenize
from pathlib import Path

import numpy as np

from torchtitan.files.regular import check_regular


def map_npy(path: Path) -> np.ndarray:
    """Map a file's array into memory. Raises OSError: unreadable; ValueError: not npy, or a damaged header."""
    check_regular(path)
    try:
        return np.lib.format.open_memmap(path, mode="r")  # no archives, no pickles
    except (SyntaxError, tokenize.TokenError, TypeError, OverflowError) as error:  # of its parser of headers
        raise ValueError("the header is damaged") from error
