"""One launch at a time writes into a run's folder."""

import errno
import fcntl
import json
import logging
import os
import socket
from datetime import datetime
from pathlib import Path

from torchtitan.files.ownership import LOCK_FILE

logger = logging.getLogger(__name__)


class Busy(Exception):
    """Another process is at work in a folder: the same command can be given again when that has ended."""

    def __init__(self, folder: Path | str, owner: str, advice: str) -> None:
        """
        Args:
            folder: that was asked for.
            owner: the process, as `RunLock.acquire` says it.
            advice: what else to give than the folder.
        """
        super().__init__(str(folder), owner, advice)  # an exception travels between ranks by its arguments

    def __str__(self) -> str:
        folder, owner, advice = self.args
        return f"{folder}: another process writes here: {owner} (wait for it, stop it, or {advice})"


class RunLock:
    """A lock on a folder that ends with this process, however it ends.

    It belongs to the process (POSIX record lock, which network file systems know as well): a data worker that outlives
    a killed run does not keep it, and the file that is left behind blocks nobody.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOCK_FILE
        self._descriptor: int | None = None

    def acquire(self) -> str | None:
        """Take the lock, or say which process holds it. Raises OSError if the file cannot be opened."""
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
        mine = {"host": socket.gethostname(), "pid": os.getpid(), "started": datetime.now().isoformat(" ", "seconds")}
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, (json.dumps(mine) + "\n").encode(), 0)
        return None

    def release(self) -> None:
        """Give the lock back, if it is held."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _read_owner(descriptor: int) -> str:
    try:
        owner = json.loads(os.pread(descriptor, 4096, 0))
        host, pid, started = (str(owner[key])[:80] for key in ("host", "pid", "started"))
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
    return ascii(f"host {host}, process {pid}, since {started}").strip("'\"")
