"""Append-only file of records that tolerates a failing disk and power cuts.

Records stay in memory until the disk is known to hold them: those that cannot be written wait, and those that the
kernel may have dropped after a failed sync are written again.
"""

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from torchtitan.files.durable import make_folder, sync
from torchtitan.files.optional import OptionalOutputs
from torchtitan.files.regular import refuse_other_than_file

MIB = 2**20


class PatientFile:
    """Writer that appends records to a file. Only `open` raises OSError; any thread may sync while another adds.

    The file holds whole records only, and readers may follow it. It is created again if it is removed.
    """

    def __init__(
        self,
        path: Path,
        output: str,
        *,
        prepare: Callable[[], None] = lambda: None,
        most_kept: int = 4 * MIB,
        may_lose: bool = False,
    ) -> None:
        """
        Args:
            path: of the file; not touched before `open` or the first record.
            output: its name in log lines.
            prepare: brings a file that is already there into the state to append to; called before it is first opened.
            most_kept: bytes of records in memory; beyond it the file is synced, or the oldest records are given up.
            may_lose: whether records may be given up.
        """
        self._path, self._output, self._prepare = path, output, prepare
        self._most_kept, self._may_lose = most_kept, may_lose
        self._outputs = OptionalOutputs()
        self._lock = threading.Lock()  # of what is below
        self._syncing = threading.Lock()  # held over an fsync, during which records are added
        self._file = -1  # closed
        self._num_opened = 0  # a number of a file may come again
        self._cut_to: int | None = None  # size to cut the file to before anything is appended
        self._safe_size = 0  # of the file at the last sync
        self._kept: list[bytes] = []  # records since then, the first `_written` of them in the file
        self._written = 0
        self._kept_size = 0
        self._num_forgotten = 0  # records that are no longer kept
        self._sync_above = most_kept  # bytes kept
        self._name_is_safe = False
        self._sync_failed = False

    def open(self) -> None:
        """Open the file, ready for records. Raises OSError."""
        with self._lock:
            self._open()

    def add(self, record: bytes) -> None:
        """Add a record; it waits in memory while it cannot be written."""
        with self._lock:
            self._kept.append(record)
            self._kept_size += len(record)
            self._write()
            if self._may_lose:
                self._give_up_oldest()
            sync_now = self._kept_size > self._sync_above
        if sync_now:
            self.sync()

    def sync(self) -> bool:
        """Sync all records to the disk; return whether the disk holds them."""
        with self._syncing:
            with self._lock:
                if not self._write():
                    return False
                if not self._kept:
                    return True
                num_opened, name_is_safe = self._num_opened, self._name_is_safe
                end = self._num_forgotten + len(self._kept)
                try:
                    size, file = os.fstat(self._file).st_size, os.dup(self._file)
                except OSError as error:
                    self._failed(error)
                    return False
            try:
                os.fsync(file)
                if not name_is_safe:
                    sync(self._path.parent)
            except OSError as error:
                with self._lock:
                    self._write_again(error)
                return False
            finally:
                os.close(file)
            with self._lock:
                if self._num_opened != num_opened:  # removed meanwhile, and made again
                    return False
                self._name_is_safe, self._sync_failed, self._safe_size = True, False, size
                self._forget(max(end - self._num_forgotten, 0))
            self._outputs.worked(self._output, self._path)
            return True

    def settle(self, seconds: float) -> int:
        """Settle: sync, and retry for that time while it fails; return the number of records that the disk lacks."""
        deadline, pause = time.monotonic() + seconds, 0.1
        while not self.sync() and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(pause, left))
            pause = min(2 * pause, 1.0)
        return len(self.unsaved())

    def unsaved(self) -> list[bytes]:
        """Records that the disk is not known to hold, in order."""
        with self._lock:
            return self._kept.copy()

    def close(self) -> None:
        """Close the file; write the waiting records, if that is possible now."""
        with self._syncing, self._lock:
            self._write()
            self._close()

    # ---------------------------------------------------------------------- with the lock held

    def _write(self) -> bool:
        if not self._kept:
            return True
        try:
            self._open()
            self._cut()
            for record in self._kept[self._written :]:
                self._cut_to = os.fstat(self._file).st_size  # if it comes to a half record
                _write_whole(self._file, record)
                self._cut_to = None
                self._written += 1
        except OSError as error:
            with suppress(OSError):  # later, if not now
                self._cut()
            self._failed(error)
            return False
        if not self._sync_failed:
            self._outputs.worked(self._output, self._path)
        return True

    def _open(self) -> None:
        if self._file >= 0:
            if self._is_there():
                return
            self._close()
        make_folder(self._path.parent)
        refuse_other_than_file(self._path)
        self._prepare()
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        self._file = os.open(self._path, flags, 0o666)
        self._num_opened += 1
        self._prepare = _nothing
        self._safe_size = os.fstat(self._file).st_size
        self._written, self._cut_to, self._name_is_safe = 0, None, False

    def _is_there(self) -> bool:
        try:
            own = os.fstat(self._file)
        except OSError:  # its disk is gone, and perhaps another in its place
            return False
        try:
            return os.path.samestat(own, os.stat(self._path))
        except (FileNotFoundError, NotADirectoryError):
            return False

    def _cut(self) -> None:
        if self._cut_to is not None and self._file >= 0:
            if os.fstat(self._file).st_size > self._cut_to:
                os.ftruncate(self._file, self._cut_to)
            self._cut_to = None

    def _write_again(self, error: OSError) -> None:
        self._failed(error)
        self._sync_failed, self._sync_above = True, self._kept_size + self._most_kept
        self._cut_to, self._written = self._safe_size, 0
        self._write()

    def _failed(self, error: OSError) -> None:
        kept = "the newest records" if self._may_lose else "its lines"
        self._outputs.failed(self._output, self._path, error, f"training continues, {kept} wait in memory")

    def _give_up_oldest(self) -> None:
        count, size = 0, 0
        while self._kept_size - size > self._most_kept:
            size += len(self._kept[count])
            count += 1
        self._safe_size += sum(map(len, self._kept[: min(count, self._written)]))  # the kernel may lose those
        self._forget(count)

    def _forget(self, count: int) -> None:
        self._kept_size -= sum(map(len, self._kept[:count]))
        del self._kept[:count]
        self._num_forgotten += count
        self._written = max(self._written - count, 0)
        self._sync_above = self._most_kept

    def _close(self) -> None:
        if self._file >= 0:
            with suppress(OSError):  # a network file system tells only now of what it has lost
                os.close(self._file)
            self._file = -1


def _write_whole(file: int, record: bytes) -> None:
    left = memoryview(record)
    while left:
        left = left[os.write(file, left) :]


def _nothing() -> None:
    pass
