"""Arrays of npz files, read in parts: batches of images, and statistics of features. Pickles are refused."""

import math
import threading
import tokenize
import zipfile
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import numpy as np

from torchtitan.errors import EvaluationError, first_line
from torchtitan.files.regular import check_regular

NPZ_SUFFIX = ".npz"
MOST_ARRAYS = 64
_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
# zipfile raises NotImplementedError for a compression that it lacks, RuntimeError for an encrypted member.
_DAMAGE = (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError)


@dataclass
class NPZArray:
    """Array in an npz file, read by its first dimension; a rising order of reads is cheap for a compressed one too.

    Attributes:
        start: byte where its values begin in its member.
    """

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    start: int
    _member: IO[bytes] | None = field(default=None, repr=False)
    _turn: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def read(self, begin: int, end: int) -> np.ndarray:
        """Read rows begin .. end - 1. Raises EvaluationError: they are damaged."""
        row = self.dtype.itemsize * math.prod(self.shape[1:])
        with self._turn:
            try:
                if self._member is None:
                    self._member = zipfile.ZipFile(self.path).open(f"{self.name}.npy")
                self._member.seek(self.start + begin * row)
                content = self._member.read((end - begin) * row)
            except _DAMAGE as error:
                raise _damaged(self.path, self.name, first_line(error)) from error
        if len(content) != (end - begin) * row:
            raise _damaged(self.path, self.name, "it is cut off")
        return np.frombuffer(content, self.dtype).reshape(end - begin, *self.shape[1:])

    def whole(self) -> np.ndarray:
        """Read all of it. Raises EvaluationError."""
        return self.read(0, self.shape[0])


def open_npz(path: Path) -> dict[str, NPZArray]:
    """Arrays of an npz file by name; their headers alone are read.

    Raises:
        EvaluationError: it is no such file, is damaged, or holds pickled objects.
    """
    try:
        check_regular(path)
        with zipfile.ZipFile(path) as archive:
            names = [info.filename for info in archive.infolist()]
            if len(names) > MOST_ARRAYS:
                raise EvaluationError(f"{path}: {len(names)} members, more than {MOST_ARRAYS} (no batch of images)")
            return {
                name.removesuffix(".npy"): _header(path, name.removesuffix(".npy"), archive)
                for name in names if name.endswith(".npy")
            }
    except FileNotFoundError as error:
        raise EvaluationError(f"{path}: no such file") from error
    except _DAMAGE as error:
        raise EvaluationError(f"{path}: is no readable npz file: {first_line(error)}") from error


def _header(path: Path, name: str, archive: zipfile.ZipFile) -> NPZArray:
    with archive.open(f"{name}.npy") as member:
        try:
            version = np.lib.format.read_magic(member)
            if version not in _HEADERS:
                raise ValueError(f"format {version}")
            shape, fortran, dtype = _HEADERS[version](member)
        except (*_DAMAGE, SyntaxError, tokenize.TokenError, TypeError, OverflowError) as error:
            raise _damaged(path, name, first_line(error)) from error
        if dtype.hasobject:
            raise EvaluationError(f"{path}: {name} is a pickle, which is not read (save arrays of numbers)")
        if fortran and len(shape) > 1:
            raise EvaluationError(f"{path}: {name} is stored by columns (save it in C order)")
        start, size = member.tell(), archive.getinfo(f"{name}.npy").file_size
    if min(shape, default=0) < 0 or size != start + dtype.itemsize * math.prod(shape):
        raise _damaged(path, name, "its header does not describe it")
    return NPZArray(path, name, shape, dtype, start)


def _damaged(path: Path, name: str, reason: str) -> EvaluationError:
    return EvaluationError(f"{path}: {name} is damaged: {reason[:200]}")
