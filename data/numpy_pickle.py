"""Read a pickle of numbers, bytes and NumPy arrays without ever running what it names.

Loading a pickle calls any function that the file asks for. Here each of the few names that an array's pickle
contains stands for a function of this file, and every other name is refused before anything is called.
"""

import pickle
from pathlib import Path
from typing import Any

import numpy as np


class _ArrayType:
    """Stands for `numpy.ndarray` where a pickle names it."""


class _Array:
    """Stands for an array until its content has been read."""

    def __setstate__(self, state: tuple) -> None:
        _, shape, element, fortran_order, content = state
        if not isinstance(element, _ElementType) or not isinstance(content, bytes):
            raise pickle.UnpicklingError("an array of something else than numbers")
        self.values = np.frombuffer(content, element.dtype).reshape(shape, order="F" if fortran_order else "C")


class _ElementType:
    """Stands for `numpy.dtype`: little-endian integers only."""

    def __init__(self, code: str | bytes, *flags: Any) -> None:
        code = code.decode("latin1") if isinstance(code, bytes) else code
        if code not in ("u1", "i4", "i8"):
            raise pickle.UnpicklingError(f"an array of type {code!r}")
        self.dtype = np.dtype("<" + code)

    def __setstate__(self, state: tuple) -> None:
        if state[1] in (">", b">"):
            raise pickle.UnpicklingError("a big-endian array")


def _reconstruct(array_type: type, shape: tuple, code: Any) -> _Array:
    return _Array()


def _encode(text: str, encoding: str) -> bytes:
    if encoding not in ("latin1", "latin-1"):
        raise pickle.UnpicklingError(f"text encoded as {encoding!r}")
    return text.encode("latin1")


_STAND_INS = {
    ("numpy", "ndarray"): _ArrayType,
    ("numpy", "dtype"): _ElementType,
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
    ("_codecs", "encode"): _encode,  # how protocol 2 writes bytes
}


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _STAND_INS:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which numbers and arrays do not need")
        return _STAND_INS[module, name]


def read_table(path: Path) -> dict[str, Any]:
    """Read a pickled dict of numbers, lists, bytes and integer arrays.

    Args:
        path: a file that may have been written by Python 2 or 3.

    Returns:
        the dict, keys as str, arrays as read-only NumPy arrays.

    Raises:
        pickle.UnpicklingError: the file is damaged, is not a dict, or names anything else; nothing was executed.
        OSError: the file cannot be read.
    """
    with open(path, "rb") as file:
        try:
            table = _Reader(file, encoding="bytes").load()
            if not isinstance(table, dict):
                raise pickle.UnpicklingError("not a dict")
            return {
                key.decode("latin1") if isinstance(key, bytes) else key: value.values
                if isinstance(value, _Array)
                else value
                for key, value in table.items()
            }
        except (pickle.UnpicklingError, OSError):
            raise
        except Exception as error:  # a damaged pickle fails in any way
            raise pickle.UnpicklingError(f"damaged ({type(error).__name__}: {error})") from error
