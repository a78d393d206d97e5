"""Read a pickle of numbers, bytes and NumPy arrays without running any function that it names."""

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np

from torchtitan.files.regular import read_regular

MAX_BYTES = 256 << 20  # CIFAR-100's largest batch has 155 MB


def read_table(path: Path) -> dict[str, Any]:
    """Read a pickled dict of numbers, lists, bytes and arrays, written by Python 2 or 3.

    Raises:
        pickle.UnpicklingError: the file is damaged, is not a dict, or names anything else; nothing was executed.
        OSError: the file cannot be read, or is no regular one.
    """
    content = read_regular(path, MAX_BYTES)
    try:
        table = _TableUnpickler(io.BytesIO(content), encoding="latin1").load()
    except pickle.UnpicklingError:
        raise
    except Exception as error:  # a damaged pickle fails in any way
        raise pickle.UnpicklingError(f"damaged ({type(error).__name__})") from error
    if not isinstance(table, dict):
        raise pickle.UnpicklingError("not a dict")
    return {key.decode("latin1") if isinstance(key, bytes) else key: value for key, value in table.items()}


def _reconstruct(array_type: type, shape: tuple, code: Any) -> np.ndarray:
    """Empty array, which the pickle then fills."""
    return np.ndarray((0,), np.uint8)


def _encode(text: str, encoding: str) -> bytes:
    if encoding not in ("latin1", "latin-1"):
        raise pickle.UnpicklingError(f"text in {encoding!r:.40}")
    return text.encode("latin1")


_SCALAR = np.float64(0).__reduce__()[0]  # NumPy's constructor of a number
_KNOWN = {
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct, ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy.core.multiarray", "scalar"): _SCALAR, ("numpy._core.multiarray", "scalar"): _SCALAR,
    ("numpy", "ndarray"): np.ndarray, ("numpy", "dtype"): np.dtype, ("_codecs", "encode"): _encode,
}  # fmt: skip


class _TableUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _KNOWN:
            raise pickle.UnpicklingError(f"it names {module:.80}.{name:.80}, which numbers and arrays do not need")
        return _KNOWN[module, name]
