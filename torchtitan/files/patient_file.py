"""Append-only file of records that waits for a full disk."""

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from torchtitan.files.durable import make_folder, sync
from torchtitan.files.optional import OptionalOutputs
from torchtitan.files.regular import refuse_other_than_file

_MOST_WAITING = 64 << 20  # bytes of records in memory


class PatientFile:
    """Writer that appends whole records to a file. Only `open` raises OSError; any thread may sync while another adds.

    Records that cannot be written wait in memory, the newest of them where they are many.
    """

    def __init__(self, path: Path, output: str, prepare: Callable[[], None] = lambda: None) -> None:
        """
        Args:
            path: not touched before `open` or the first record.
            output: its name in log lines.
            prepare: brings a file that is already there into the state to append to; called before it is opened.
        """
        self._path, self._output, self._prepare = path, output, prepare
        self._outputs = OptionalOutputs()
        self._lock = threading.Lock()  # of what is below; not held over an fsync
        self._file: BinaryIO | None = None
        self._waiting: list[bytes] = []

    def open(self) -> None:
        """Open the file, ready for records. Raises OSError."""
        with self._lock:
            self._opened()

    def add(self, record: bytes) -> None:
        """Add a record; it waits in memory while it cannot be written."""
        with self._lock:
            self._waiting.append(record)
            self._write()
            while sum(map(len, self._waiting)) > _MOST_WAITING:
                del self._waiting[0]

    def sync(self) -> None:
        """Sync all records to the disk, as far as the disk allows."""
        with self._lock:
            self._write()
            file = self._file
        try:
            if file is not None:
                os.fsync(file.fileno())
                sync(self._path.parent)
        except OSError as error:
            self._failed(error)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def close(self) -> None:
        """Close the file; write the waiting records, if that is possible now."""
        with self._lock:
            self._write()
            if self._file is not None:
                with suppress(OSError):  # a network file system tells only now of what it has lost
                    self._file.close()
            self._file = None

    def _opened(self) -> BinaryIO:
        if self._file is None:
            make_folder(self._path.parent)
            refuse_other_than_file(self._path)
            self._prepare()
            self._prepare = lambda: None
            self._file = open(self._path, "ab", buffering=0)
        return self._file

    def _write(self) -> None:
        """Write the waiting records, with the lock held."""
        while self._waiting:
            try:
                _append_whole(self._opened(), self._waiting[0])
            except OSError as error:
                self._failed(error)
                return
            del self._waiting[0]
            self._outputs.worked(self._output, self._path)

    def _failed(self, error: OSError) -> None:
        self._outputs.failed(self._output, self._path, error, "training continues, its records wait in memory")


def _append_whole(file: BinaryIO, record: bytes) -> None:
    """Append a record, or nothing of it. Raises OSError."""
    size = file.seek(0, os.SEEK_END)
    try:
        left = memoryview(record)
        while left:
            left = left[file.write(left) :]
    except OSError:
        with suppress(OSError):
            file.truncate(size)
        raise
