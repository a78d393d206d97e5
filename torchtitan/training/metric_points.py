"""Points of metrics.jsonl, read line by line within a bound of memory, from any source."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from torchtitan.files.regular import open_regular

SESSION_FILE = "session.json"  # of a run, written when its processes start and when its samples were measured
TIMED = "timed"  # entry of a summary: what its speeds depend on, and the step after which that was so
LONGEST_LINE = 1 << 20  # bytes; a point of 1,000 bins and the noise scale of 64 has 0.1 MB
MOST_KEPT = 1 << 26  # bytes of lines whose points are held; as objects they take about ten times as much
LATEST_STEP = 2**63
_GIVEN_UP = 1 << 28  # bytes without an end of a line, behind which nothing is looked for: a hole, or another file


@dataclass
class MetricPoints:
    """Metric points read from a file.

    Attributes:
        points: in the order of steps; later lines follow earlier ones of the same step.
        damaged: number of invalid lines (a kill may cut the last one).
        stride: 1; for too large a file k: every k-th point was kept, and the last one.
    """

    points: list[dict[str, Any]] = field(default_factory=list)
    damaged: int = 0
    stride: int = 1


def read_points(path: Path) -> MetricPoints:
    """Read metrics.jsonl as written by now. Raises OSError: it cannot be read, or is no regular file."""
    found, kept, last = MetricPoints(), [], None
    size = number = 0
    with open_regular(path) as file:
        for line in _lines(file, os.fstat(file.fileno()).st_size):
            point = parse_point(line)
            if point is None:
                found.damaged += 1
                continue
            last = len(line), point
            if number % found.stride == 0:
                kept.append(last)
                size += len(line)
            number += 1
            while size > MOST_KEPT and len(kept) > 1:
                kept, found.stride = kept[::2], 2 * found.stride
                size = sum(length for length, _ in kept)
    if last is not None and last is not kept[-1]:
        kept.append(last)
    found.points = sorted((point for _, point in kept), key=lambda point: point["step"])
    return found


def last_smaller_batch(points: Sequence[Mapping[str, Any]]) -> int:
    """Last logged step with a batch below the largest; 0: none. The last point is left out: its batch may be a remainder."""
    sizes = [(point["step"], point["global_batch_size"]) for point in points if point.get("global_batch_size")]
    largest = max((size for _, size in sizes), default=0)
    return max((step for step, size in sizes[:-1] if size < largest), default=0)


def iter_points(path: Path, word: str = "") -> Iterator[dict[str, Any]]:
    """Yield the points whose lines hold a word, in the order of the file; damaged lines are left out. Raises OSError."""
    with open_regular(path) as file:
        for line in _lines(file, os.fstat(file.fileno()).st_size):
            if word.encode() in line and (point := parse_point(line)):
                yield point


class ThinnedPoints:
    """Points in the order in which they are added, bounded in number.

    Of more than `most` every second is dropped, then of as many again, and so on; the last one is always there.
    """

    def __init__(self, most: int = 2_000) -> None:
        self._most = most
        self._points: list[dict[str, Any]] = []
        self._last: dict[str, Any] | None = None
        self._number, self._stride = 0, 1

    def add(self, point: dict[str, Any]) -> None:
        self._last = point
        if self._number % self._stride == 0:
            self._points.append(point)
        self._number += 1
        if len(self._points) > self._most:
            self._points, self._stride = self._points[::2], 2 * self._stride

    def read(self) -> list[dict[str, Any]]:
        """Return the points kept."""
        if self._last is None or self._last is self._points[-1]:
            return self._points
        return [*self._points, self._last]


def parse_point(line: bytes) -> dict[str, Any] | None:
    """Parse a line as a point; None for half a line and other damage."""
    if b"\0" in line:  # a block that a power cut has kept from the disk
        return None
    try:
        point = json.loads(line)
    except (ValueError, RecursionError):
        return None
    step = point.get("step") if isinstance(point, dict) else None
    return point if type(step) is int and 0 <= step < LATEST_STEP else None


def _lines(file: BinaryIO, end: int) -> Iterator[bytes]:
    """Lines that are not blank, up to a place in the file; of a long one, a beginning; none after a gap."""
    while (left := end - file.tell()) > 0:
        line = file.readline(min(left, LONGEST_LINE))
        rest, start = line, file.tell()
        while rest and not rest.endswith(b"\n") and file.tell() < min(end, start + _GIVEN_UP):
            rest = file.readline(min(end - file.tell(), LONGEST_LINE))
        if not line:  # it was cut back meanwhile
            return
        if line.strip():
            yield line
        if file.tell() >= start + _GIVEN_UP:
            return


def timed_since(step: int) -> str:
    """Predicate of a run that was last resumed in another way after a step."""
    how = "another layout, batch, device, compilation or checkpointing"
    return f"was resumed with {how} after step {step:,}: its speeds are of the steps since, and its time of training is left out"
