"""Files of one NumPy array, from any source."""

import tokenize
from pathlib import Path

import numpy as np

from torchtitan.files.regular import check_regular


def map_npy(path: Path) -> np.ndarray:
    """Map the array of a file into memory.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no such file, or its header is damaged.
    """
    check_regular(path)
    try:
        return np.lib.format.open_memmap(path, mode="r")  # no archives, no pickles
    except (SyntaxError, tokenize.TokenError, TypeError, OverflowError) as error:  # of its parser of headers
        raise ValueError("the header is damaged") from error
