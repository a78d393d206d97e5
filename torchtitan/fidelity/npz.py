"""Arrays of npz files, read in parts: batches of images, and statistics of features. Pickles are refused."""

import math
import threading
import zipfile
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import numpy as np

from torchtitan.errors import EvaluationError, first_line
from torchtitan.files.regular import check_regular

NPZ_SUFFIX = ".npz"
_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
# zipfile raises NotImplementedError for a compression that it lacks, RuntimeError for an encrypted member.
_DAMAGE = (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error, KeyError, NotImplementedError, RuntimeError)


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
                raise EvaluationError(f"{self.path}: {self.name} is damaged: {first_line(error)}") from error
        return np.frombuffer(content, self.dtype).reshape(end - begin, *self.shape[1:])

    def whole(self) -> np.ndarray:
        """Read all of it. Raises EvaluationError."""
        return self.read(0, self.shape[0])


def open_npz(path: Path) -> dict[str, NPZArray]:
    """Arrays of an npz file, headers alone read. Raises EvaluationError: no such file, damaged, pickled objects."""
    try:
        check_regular(path)
        with zipfile.ZipFile(path) as archive:
            names = [name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy")]
            return {name: _header(path, name, archive) for name in names}
    except FileNotFoundError as error:
        raise EvaluationError(f"{path}: no such file") from error
    except _DAMAGE as error:
        raise EvaluationError(f"{path}: is no readable npz file: {first_line(error)}") from error


def _header(path: Path, name: str, archive: zipfile.ZipFile) -> NPZArray:
    with archive.open(f"{name}.npy") as member:
        shape, fortran, dtype = _HEADERS[np.lib.format.read_magic(member)](member)
        if dtype.hasobject:
            raise EvaluationError(f"{path}: {name} is a pickle, which is not read (save arrays of numbers)")
        if fortran and len(shape) > 1:
            raise EvaluationError(f"{path}: {name} is stored by columns (save it in C order)")
        start, size = member.tell(), archive.getinfo(f"{name}.npy").file_size
    if size != start + dtype.itemsize * math.prod(shape):
        raise EvaluationError(f"{path}: {name} is damaged: its header does not describe it")
    return NPZArray(path, name, shape, dtype, start)
