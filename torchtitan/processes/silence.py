"""A line on work that takes long without a word."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SECONDS = 5.0


@contextmanager
def named_if_long(doing: str, say: Callable[[str], None]) -> Iterator[None]:
    """Name the work inside in a line, once it has taken some seconds."""
    line = threading.Timer(SECONDS, say, [f"{doing} ..."])
    line.daemon = True
    line.start()
    try:
        yield
    finally:
        line.cancel()
