"""Rows of studies' tables."""

import time
from collections.abc import Sequence
from pathlib import Path

from tests.end_to_end.tools import table
from tests.forked import start_script


def rows_of(folder: Path) -> list[dict[str, str]]:
    """The rows of a study's results."""
    return table(folder / "results.csv")


def rows_of_killed(words: Sequence, folder: Path) -> list[dict[str, str]]:
    """Kill a study once its table in a folder has two rows or more; return these rows."""
    process = start_script("-m", "research", *map(str, words))
    results, deadline = folder / "results.csv", time.monotonic() + 300
    while not (results.exists() and results.read_bytes().count(b"\n") >= 3):
        assert process.poll() is None and time.monotonic() < deadline, process.said()
        time.sleep(0.01)
    process.kill()
    process.wait()
    return rows_of(folder)
