"""Bounds around code that reads damaged files: time, memory, and where it writes."""

import contextlib
import io
import logging
import os
import resource
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CHANGES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod"}


class TooLong(BaseException):
    """The time is over; no `except Exception` of the program catches it."""


class WriteWatch:
    """Notes every path outside of one folder that Python code of this process opens for writing, renames or removes.

    An audit hook stays for the life of the process; this one does nothing while no folder is watched.
    """

    def __init__(self) -> None:
        self.outside: list[str] = []
        self._folder: str | None = None
        sys.addaudithook(self._see)

    @contextlib.contextmanager
    def inside(self, folder: Path) -> Iterator[None]:
        self.outside, self._folder = [], os.path.realpath(folder)
        try:
            yield
        finally:
            self._folder = None

    def _see(self, event: str, arguments: tuple) -> None:
        if self._folder is None:
            return
        if event == "open" and isinstance(arguments[2], int) and arguments[2] & _WRITES:
            self._note(event, arguments[0])
        elif event in _CHANGES:
            first, last = {"os.rename": (0, 2), "os.link": (0, 2), "os.symlink": (1, 2)}.get(event, (0, 1))
            folder = arguments[1] if event in ("os.remove", "os.rmdir") and arguments[1] >= 0 else None
            for target in arguments[first:last]:
                self._note(event, target, folder)

    def _note(self, event: str, path: Any, folder: int | None = None) -> None:
        if isinstance(path, int):
            return  # a descriptor: its opening was seen
        path = os.fsdecode(path)
        if folder is not None:
            path = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), path)
        parent = os.path.realpath(os.path.dirname(os.path.abspath(path)))
        if path != os.devnull and parent != self._folder and not parent.startswith(self._folder + os.sep):
            self.outside.append(f"{event} {path}")


class Output(logging.Handler):
    """What is printed and logged inside `kept`."""

    def __init__(self) -> None:
        super().__init__()
        self.stderr, self.stdout, self.messages = "", "", []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        root, stderr, stdout = logging.getLogger(), io.StringIO(), io.StringIO()
        others, level = root.handlers[:], root.level
        root.handlers[:] = [self]
        root.setLevel(logging.INFO)
        try:
            with contextlib.redirect_stderr(stderr), contextlib.redirect_stdout(stdout):
                yield
        finally:
            root.handlers[:] = others
            root.setLevel(level)
            self.stderr, self.stdout = stderr.getvalue(), stdout.getvalue()


@contextlib.contextmanager
def bounded(seconds: float, more_bytes: int) -> Iterator[None]:
    """Raise TooLong after a time, and let allocations fail beyond what the process has mapped now and `more_bytes`."""

    def too_long(*_: object) -> None:
        raise TooLong

    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    handler = signal.signal(signal.SIGALRM, too_long)
    resource.setrlimit(resource.RLIMIT_AS, (mapped + more_bytes, limits[1]))
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, limits)
        signal.signal(signal.SIGALRM, handler)


def peak_bytes() -> int:
    """The most memory that this process has had so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
