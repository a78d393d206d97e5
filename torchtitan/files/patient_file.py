"""Append-only file of records that waits for a full disk."""

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from torchtitan.files.durable import make_folder, sync
from torchtitan.files.optional import OptionalOutputs
from torchtitan.files.regular import refuse_other_than_file

_MOST_KEPT = 4 << 20  # bytes of records in memory


class PatientFile:
    """Writer that appends whole records to a file. Only `open` raises OSError; any thread may sync while another adds.

    Records that cannot be written wait in memory. Those since the last sync are kept there too, for a checkpoint to hold.
    """

    def __init__(
        self, path: Path, output: str, *, prepare: Callable[[], None] = lambda: None, may_lose: bool = False
    ) -> None:
        """
        Args:
            path: not touched before `open` or the first record.
            output: its name in log lines.
            prepare: brings a file that is already there into the state to append to; called before it is opened.
            may_lose: whether a full memory gives up the oldest records that wait; if not, it is synced.
        """
        self._path, self._output, self._prepare, self._may_lose = path, output, prepare, may_lose
        self._outputs = OptionalOutputs()
        self._lock = threading.Lock()  # of what is below; not held over an fsync
        self._file: BinaryIO | None = None
        self._kept: list[bytes] = []  # the first `_written` of them are in the file
        self._written = 0

    def open(self) -> None:
        """Open the file, ready for records. Raises OSError."""
        with self._lock:
            self._opened()

    def add(self, record: bytes) -> None:
        """Add a record; it waits in memory while it cannot be written."""
        with self._lock:
            self._kept.append(record)
            self._write()
            while self._may_lose and self._is_full():
                del self._kept[0]
            sync_now = self._is_full()
        if sync_now:
            self.sync()

    def sync(self) -> bool:
        """Sync all records to the disk; return whether the disk holds them."""
        with self._lock:
            if not self._write():
                return False
            file, count = self._file, self._written
        if file is None:  # there was no record yet
            return True
        try:
            os.fsync(file.fileno())
            sync(self._path.parent)
        except OSError as error:
            self._failed(error)
            return False
        with self._lock:
            del self._kept[:count]
            self._written -= count
        return True

    def settle(self, seconds: float) -> int:
        """Settle: sync, and retry for that time while it fails; return the number of records that the disk lacks."""
        deadline = time.monotonic() + seconds
        while not self.sync() and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(0.5, left))
        return len(self.unsaved())

    def unsaved(self) -> list[bytes]:
        """Records that the disk is not known to hold, in order."""
        with self._lock:
            return self._kept.copy()

    def close(self) -> None:
        """Close the file; write the waiting records, if that is possible now."""
        with self._lock:
            self._write()
            if self._file is not None:
                with suppress(OSError):  # a network file system tells only now of what it has lost
                    self._file.close()
            self._file = None

    # ---------------------------------------------------------------------- with the lock held

    def _is_full(self) -> bool:
        return sum(map(len, self._kept)) > _MOST_KEPT

    def _opened(self) -> BinaryIO:
        if self._file is None:
            make_folder(self._path.parent)
            refuse_other_than_file(self._path)
            self._prepare()
            self._prepare = lambda: None
            self._file = open(self._path, "ab", buffering=0)
        return self._file

    def _write(self) -> bool:
        """Write the records that the file lacks; return whether it has them all."""
        while self._written < len(self._kept):
            try:
                _append_whole(self._opened(), self._kept[self._written])
            except OSError as error:
                self._failed(error)
                return False
            self._written += 1
            self._outputs.worked(self._output, self._path)
        if self._may_lose:
            del self._kept[: self._written]
            self._written = 0
        return True

    def _failed(self, error: OSError) -> None:
        kept = "the newest records" if self._may_lose else "its lines"
        self._outputs.failed(self._output, self._path, error, f"training continues, {kept} wait in memory")


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
