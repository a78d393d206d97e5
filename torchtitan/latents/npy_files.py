"""Files of one NumPy array, written by anybody."""

import tokenize
from pathlib import Path

import numpy as np


def map_npy(path: Path) -> np.ndarray:
    """The array, mapped: a damaged header could ask for any amount of memory.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no such file, or its header is damaged.
    """
    try:
        return np.lib.format.open_memmap(path, mode="r")  # no archives, no pickles
    except (SyntaxError, tokenize.TokenError, TypeError, OverflowError) as error:  # of its parser of headers
        raise ValueError("the header is damaged") from error
