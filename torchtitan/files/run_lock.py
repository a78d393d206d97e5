"""One process at a time, and one thread of it, writes into the folder of a run or of an experiment."""

import errno
import fcntl
import json
import logging
import os
import socket
import threading
import time
from datetime import datetime
from pathlib import Path
from typing import ClassVar
from weakref import WeakValueDictionary

from torchtitan.files.ownership import LOCK_FILE

logger = logging.getLogger(__name__)


class Busy(Exception):
    """Another process is at work in a folder: the same command can be given again when that has ended."""

    def __init__(self, folder: Path | str, owner: str, advice: str) -> None:
        """owner: the process, as `RunLock.acquire` says it; advice: what else to give than the folder."""
        super().__init__(str(folder), owner, advice)  # an exception travels between ranks by its arguments

    def __str__(self) -> str:
        folder, owner, advice = self.args
        if f"process {os.getpid()}," in owner and socket.gethostname() in owner:
            return f"{folder}: this process writes here already (close() its Trainer, or {advice})"
        return f"{folder}: another process writes here: {owner} (wait for it, stop it, or {advice})"


class RunLock:
    """Lock on a folder that ends with this process, however it ends.

    It belongs to the process (POSIX record lock, which network file systems know as well): a data worker that outlives
    a killed run does not keep it, and the file that is left behind blocks nobody. A second lock of the same process would
    succeed, and its release would end the first: so it is refused here, by the names of the locks that are held.
    """

    _held: ClassVar[WeakValueDictionary[tuple[int, str], "RunLock"]] = WeakValueDictionary()
    _turn: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, folder: Path, name: str = LOCK_FILE) -> None:
        """name: of the lock's file, where several things of one folder are locked apart."""
        self._path = folder / name
        self._descriptor: int | None = None
        self._owner: dict[str, str | int] = {}

    def acquire(self) -> str | None:
        """Take the lock, or say which process holds it. Raises OSError if the file cannot be opened."""
        key = _key(self._path)
        with RunLock._turn:
            other = RunLock._held.get(key)
            if other is not None and other is not self and other._descriptor is not None:
                return _owner_text(other._owner)
            owner = self._lock()
            if owner is None:
                RunLock._held[key] = self
            return owner

    def wait(self, poll_seconds: float = 0.1) -> None:
        """Take the lock as soon as nobody else has it. Raises OSError if the file cannot be opened."""
        while self.acquire() is not None:
            time.sleep(poll_seconds)

    def release(self) -> None:
        """Give the lock back, if it is held."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _lock(self) -> str | None:
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                owner = _read_owner(descriptor)
                os.close(descriptor)
                return owner
            logger.warning(f"{self._path}: this file system has no locks; make sure that no other run writes here")
        self._descriptor = descriptor
        started = datetime.now().isoformat(" ", "seconds")
        self._owner = {"host": socket.gethostname(), "pid": os.getpid(), "started": started}
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, (json.dumps(self._owner) + "\n").encode(), 0)
        return None

    @classmethod
    def is_ours(cls, folder: Path) -> bool:
        """Check whether this process holds a folder's lock."""
        lock = cls._held.get(_key(folder / LOCK_FILE))
        return lock is not None and lock._descriptor is not None


def _key(path: Path) -> tuple[int, str]:
    return os.getpid(), os.path.realpath(path.parent) + os.sep + path.name


def is_locked(folder: Path) -> bool:
    """Check whether another process holds a folder's lock."""
    try:
        descriptor = os.open(folder / LOCK_FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except OSError:
        return True
    finally:
        os.close(descriptor)


def _read_owner(descriptor: int) -> str:
    try:
        return _owner_text(json.loads(os.pread(descriptor, 4096, 0)))
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"


def _owner_text(owner: dict) -> str:
    host, pid, started = (str(owner[key])[:80] for key in ("host", "pid", "started"))
    return ascii(f"host {host}, process {pid}, since {started}").strip("'\"")
