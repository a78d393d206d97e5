"""Paths in the stores that fsspec knows (s3://, gs://, memory:// and others): as much of pathlib as checkpoints need.

A store has no rename, and its folders exist only through the files in them. Nothing here relies on either.
"""

import errno
import io
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO, cast

from torchtitan.errors import StoreError, first_line

_READ_AT_ONCE = 1 << 20  # bytes


@dataclass(frozen=True)
class RemotePath:
    """File or folder of a store; methods are pathlib's, and raise StoreError, or FileNotFoundError.

    Attributes:
        fs: fsspec's file system.
        path: as the file system names it, without a slash at its end.
    """

    fs: Any
    path: str

    @classmethod
    def from_url(cls, url: str) -> "RemotePath":
        """Path of `protocol://...`, with credentials from the environment, as the protocol's package reads them."""
        from fsspec.core import url_to_fs  # only runs with a remote folder wait for it

        with _border(url):
            fs, path = url_to_fs(url)
        return cls(fs, path.rstrip("/"))

    def __str__(self) -> str:
        return self.fs.unstrip_protocol(self.path)

    def __truediv__(self, name: str) -> "RemotePath":
        return RemotePath(self.fs, f"{self.path}/{name}")

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    @property
    def parent(self) -> "RemotePath":
        return RemotePath(self.fs, self.path.rpartition("/")[0])

    @property
    def suffix(self) -> str:
        return Path(self.name).suffix

    def lstat(self) -> SimpleNamespace:
        """Status: st_mode, only the kind of file, and st_size in bytes."""
        with _border(self):
            self.fs.invalidate_cache()
            info = self.fs.info(self.path)
            kind = {"file": stat.S_IFREG, "directory": stat.S_IFDIR}.get(info["type"], 0)
            size = info["size"]
            if kind == stat.S_IFREG and type(size) is not int:
                raise ValueError(f"its size is not known: {size!r}")
            return SimpleNamespace(st_mode=stat.S_IFLNK if info.get("islink") else kind, st_size=size)

    stat = lstat

    def exists(self) -> bool:
        try:
            self.lstat()
        except FileNotFoundError:
            return False
        return True

    def is_file(self) -> bool:
        return self.exists() and stat.S_ISREG(self.lstat().st_mode)

    def is_dir(self) -> bool:
        return self.exists() and stat.S_ISDIR(self.lstat().st_mode)

    def iterdir(self) -> Iterator["RemotePath"]:
        """List the folder's present content; nothing if it is missing."""
        try:
            with _border(self):
                self.fs.invalidate_cache()
                listed = [entry["name"].rstrip("/") for entry in self.fs.ls(self.path, detail=True)]
        except FileNotFoundError:
            return
        for name in sorted({name.rpartition("/")[2] for name in listed if name != self.path}):
            yield self / name

    def glob(self, pattern: str) -> Iterator["RemotePath"]:
        """List the folder's content that matches a pattern; the pattern has no slash."""
        return (path for path in self.iterdir() if fnmatchcase(path.name, pattern))

    def modified(self) -> datetime | None:
        """Modification time of the file, if the store knows it."""
        try:
            with _border(self):
                return self.fs.modified(self.path)
        except StoreError:
            return None

    def open(self, mode: str) -> BinaryIO:
        """Open a file: "rb", or "wb" to write it anew. It is whole in the store once `close` has returned."""
        with _border(self, writing=mode == "wb"):
            file = self.fs.open(self.path, mode)
        guarded = _StoredFile(self, file, mode)
        return cast(BinaryIO, io.BufferedReader(guarded, _READ_AT_ONCE) if mode == "rb" else guarded)

    def read_bytes(self) -> bytes:
        with self.open("rb") as file:
            return file.read()

    def write_bytes(self, content: bytes) -> None:
        """Write a small file at once."""
        self.make_parents()
        with _border(self, writing=True):
            self.fs.pipe_file(self.path, content)

    def make_parents(self) -> None:
        """Make the parent folders, in stores that have folders."""
        if not self.path.startswith("/"):  # begins with a bucket: it needs no folders, and is not made for a slip of the pen
            return
        with _border(self, writing=True):
            self.fs.makedirs(self.parent.path, exist_ok=True)

    def copy_to(self, target: "RemotePath") -> None:
        """Copy a file within the store."""
        target.make_parents()
        with _border(self):
            self.fs.cp_file(self.path, target.path)

    def unlink(self) -> None:
        """Remove a file, if it is there."""
        try:
            with _border(self):
                self.fs.rm_file(self.path)
        except FileNotFoundError:
            return

    def remove_files(self, names: Sequence[str]) -> None:
        """Remove files of this folder, in one request if the store can."""
        if names:
            with _border(self):
                self.fs.rm([f"{self.path}/{name}" for name in names])

    def remove_empty(self) -> None:
        """Remove an empty folder, in stores that have folders."""
        with _border(self):
            self.fs.invalidate_cache()
            if self.fs.isdir(self.path):
                self.fs.rmdir(self.path)


# Where checkpoints may be.
AnyPath = Path | RemotePath


class _StoredFile(io.RawIOBase):
    """Open file of a store, with the errors of RemotePath."""

    def __init__(self, path: RemotePath, file: Any, mode: str) -> None:
        self._path, self._file, self._mode = path, file, mode

    def readable(self) -> bool:
        return self._mode == "rb"

    def writable(self) -> bool:
        return self._mode == "wb"

    def readinto(self, buffer: Any) -> int:
        with _border(self._path):
            data = self._file.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def write(self, data: Any) -> int:
        with _border(self._path, writing=True):
            self._file.write(data)
        return len(data)

    def close(self) -> None:
        if self.closed:
            return
        try:
            with _border(self._path, writing=self.writable()):
                self._file.close()
        finally:
            super().close()


@contextmanager
def _border(place: object, writing: bool = False) -> Iterator[None]:
    """Border between this program and a store's package: of all its exceptions, two kinds come back."""
    try:
        yield
    except Exception as error:  # each package has its own, most of them no OSError
        if isinstance(error, FileNotFoundError) and not writing:  # when writing, it is the bucket that is missing
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(place)) from error
        raise StoreError(f"{place}: {type(error).__name__}: {first_line(error)}") from error
