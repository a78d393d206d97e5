"""Cut metrics.jsonl back to the step that a run resumes from."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from torchtitan.files.durable import replacing
from torchtitan.training.metric_points import parse_point

_LONGEST_LINE = 16 << 20


def cut_metrics(path: Path, last_step: int) -> None:
    """Drop points from metrics.jsonl, so that a resumed run reads as one run.

    Dropped are those after a step, and what a kill or a power cut has left of others: half lines, blocks of zeros. At the end
    of the file they are cut off in place.

    Raises:
        OSError: the file cannot be read or written; it is as it was.
    """
    try:
        file = open(path, "r+b")
    except FileNotFoundError:
        return
    with file:
        end, damaged = 0, False  # of the points to keep, if nothing is between them
        for line in _lines(file):
            if _keeps(line, last_step):
                damaged |= end + len(line) != file.tell() or not line.endswith(b"\n")
                end += len(line)
        if not damaged:
            if end < file.tell():
                file.truncate(end)
                os.fsync(file.fileno())
            return
        file.seek(0)
        with replacing(path) as unfinished, open(unfinished, "xb") as whole:
            whole.writelines(line.rstrip(b"\n") + b"\n" for line in _lines(file) if _keeps(line, last_step))


def _lines(file: BinaryIO) -> Iterator[bytes]:
    return iter(lambda: file.readline(_LONGEST_LINE), b"")


def _keeps(line: bytes, last_step: int) -> bool:
    point = parse_point(line)
    return point is not None and point["step"] <= last_step
