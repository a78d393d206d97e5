"""Files of one NumPy array, from any source."""

import tokenize
from pathlib import Path

import numpy as np

from torchtitan.files.regular import open_regular

MAX_HEADER_BYTES = 1 << 16


def map_npy(path: Path) -> np.ndarray:
    """Map the array of a file into memory: a damaged header could ask for any amount of memory.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no such file, or its header is damaged.
    """
    with open_regular(path) as file:
        # The library makes room for a header as long as it says to be.
        beginning = file.read(12)
    if beginning[6:7] in (b"\2", b"\3") and int.from_bytes(beginning[8:12], "little") > MAX_HEADER_BYTES:
        raise ValueError("the header is damaged")
    try:
        return np.lib.format.open_memmap(path, mode="r")  # no archives, no pickles
    except (SyntaxError, tokenize.TokenError, TypeError, OverflowError) as error:  # of its parser of headers
        raise ValueError("the header is damaged") from error
