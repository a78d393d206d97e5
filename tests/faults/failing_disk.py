"""A disk that fails while a switch is on, for Python's files below one folder, in the process that arms it.

The functions with which Python opens, syncs and renames files are replaced in that process alone, and its clock; the
program knows nothing of it. What C++ writes by itself is not met: it meets the mounts of tests/faults/disk_faults.py.
"""

import builtins
import errno
import io
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Asks a process for one: kind, switch (a file: on while it is there) and folder, with "|" between.
FAILING_DISK = "TEST_FAILING_DISK"
THREE_DAYS = 3 * 24 * 3600


def arm(request: str) -> None:
    """Let this process meet a kind of fault below a folder whenever the switch's file is there."""
    kind, switch, folder = request.split("|")
    KINDS[kind](Path(switch).exists, os.path.realpath(folder) + os.sep)


def _error() -> OSError:
    return OSError(errno.EIO, os.strerror(errno.EIO))


class _FailingFile(io.FileIO):
    """A file whose writes or reads a function may change or refuse."""

    on_write: Callable[[str, bytes], tuple[bytes, bool] | None] | None = None
    on_read: Callable[[str], None] | None = None

    def write(self, content: Any) -> int:
        changed = self.on_write and self.on_write(self.name, bytes(content))
        if changed is None:
            return super().write(content)
        written, fails = changed
        super().write(written)
        if fails:
            raise _error()
        return len(content)

    def readinto(self, buffer: Any) -> int:
        if self.on_read:
            self.on_read(self.name)
        return super().readinto(buffer)

    def readall(self) -> bytes:
        if self.on_read:
            self.on_read(self.name)
        return super().readall()


def _replace_open(folder: str, on_write=None, on_read=None) -> None:
    """Let files below a folder be opened as files that fail."""
    kind = type("File", (_FailingFile,), {
        "on_write": on_write and staticmethod(on_write), "on_read": on_read and staticmethod(on_read),
    })  # fmt: skip
    ordinary = io.open

    def opened(file, mode="r", buffering=-1, encoding=None, errors=None, newline=None, closefd=True, opener=None):
        if isinstance(file, int) or not os.path.realpath(os.fsdecode(file)).startswith(folder):
            return ordinary(file, mode, buffering, encoding, errors, newline, closefd, opener)
        raw = kind(os.fsdecode(file), mode.replace("b", "").replace("t", ""), opener=opener)
        if buffering == 0:
            return raw
        both, writes = "+" in mode, any(letter in mode for letter in "wxa")
        buffered = (io.BufferedRandom if both else io.BufferedWriter if writes else io.BufferedReader)(raw)
        return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding, errors, newline)

    builtins.open = io.open = opened


def _when_writing(change: Callable[[str, bytes], tuple[bytes, bool] | None]) -> Callable:
    def prepare(is_on: Callable[[], bool], folder: str) -> None:
        _replace_open(folder, on_write=lambda name, content: change(name, content) if is_on() else None)

    return prepare


def _flipped(name: str) -> Callable:
    """One bit of every file that begins with `name` is another on the disk than was written."""

    def change(path: str, content: bytes) -> tuple[bytes, bool] | None:
        if not os.path.basename(path).startswith(name) or not content:
            return None
        changed = bytearray(content)
        changed[len(changed) // 2] ^= 4
        return bytes(changed), False

    return _when_writing(change)


def _read_back(is_on: Callable[[], bool], folder: str) -> None:
    def refuse(path: str) -> None:
        if is_on() and f"{os.sep}.step-" in path:
            raise _error()

    _replace_open(folder, on_read=refuse)


def _sync(is_on: Callable[[], bool], folder: str) -> None:
    fsync = os.fsync

    def failing(descriptor: Any) -> None:
        number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
        if is_on() and os.readlink(f"/proc/self/fd/{number}").startswith(folder):
            raise _error()
        fsync(descriptor)

    os.fsync = failing


def _rename(is_on: Callable[[], bool], folder: str) -> None:
    for name in ("rename", "replace"):
        ordinary = getattr(os, name)

        def failing(source: Any, *others: Any, ordinary=ordinary, **more: Any) -> None:
            if is_on() and os.path.abspath(os.fsdecode(source)).startswith(folder):
                raise _error()
            ordinary(source, *others, **more)

        setattr(os, name, failing)


def _clock(is_on: Callable[[], bool], folder: str) -> None:
    """Wall clocks go back by three days, and so do the times of files that are written then."""
    seconds, nanoseconds = time.time, time.time_ns
    time.time = lambda: seconds() - THREE_DAYS * is_on()
    time.time_ns = lambda: nanoseconds() - THREE_DAYS * 10**9 * is_on()

    def hook(event: str, arguments: tuple) -> None:
        if event == "os.rename" and is_on() and os.path.abspath(os.fsdecode(arguments[0])).startswith(folder):
            os.utime(arguments[0], (time.time(), time.time()))

    sys.addaudithook(hook)


KINDS: dict[str, Callable[[Callable[[], bool], str], None]] = {
    "EIO in write": _when_writing(lambda path, content: (b"", True)),
    "EIO after half a write": _when_writing(lambda path, content: (content[: len(content) // 2], True)),
    "half writes that seem whole": _when_writing(
        lambda path, content: (content[: len(content) // 2], False) if "checkpoint" in path else None
    ),
    "EIO in fsync": _sync,
    "EIO in rename": _rename,
    "EIO in read-back": _read_back,
    "a bit flipped in each shard": _flipped("shard-"),
    "a bit flipped in each manifest": _flipped("manifest.json"),
    "clock back three days": _clock,
}
