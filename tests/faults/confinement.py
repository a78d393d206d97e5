"""Bounds around code that reads damaged files: time and memory."""

import contextlib
import resource
import signal
from collections.abc import Iterator
from pathlib import Path


class TooLong(BaseException):
    """The time is over; no `except Exception` of the program catches it."""


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
