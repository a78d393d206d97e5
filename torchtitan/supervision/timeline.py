"""Timeline: the events of all ranks as one trace in Chrome's format, for Perfetto."""

import gzip
import json
import zlib
from pathlib import Path
from typing import Any

from torchtitan.files.durable import make_folder, replace_file
from torchtitan.files.ownership import refuse_foreign_file
from torchtitan.files.regular import read_regular
from torchtitan.supervision.events import EVENTS_FOLDER

_LARGEST_FILE = 1 << 30  # bytes of the events of a rank
# What every trace begins with, by which one that was written before is known.
_START = b'{"displayTimeUnit": "ms", "traceEvents": ['


class TimelineError(Exception):
    """Events that cannot be read; the message is one line."""


def build_timeline(run_folder: Path) -> tuple[dict[str, Any], int]:
    """Build a timeline from the event files of a run.

    Args:
        run_folder: as outputs/digits.

    Returns:
        the trace, a process per rank with times in microseconds since the first event; and the number of invalid lines
        that are left out, such as the last one of a killed process.

    Raises:
        TimelineError: there are no events, or they cannot be read.
    """
    folder = run_folder / EVENTS_FOLDER
    paths = sorted(folder.glob("rank-*.jsonl"))
    if not paths:
        raise TimelineError(f"{folder}: holds no events (train with --metrics.enable_events true)")
    ranks, damaged = {}, 0
    for path in paths:
        events, wrong = _read(path)
        damaged += wrong
        if events:
            ranks[int(path.stem.removeprefix("rank-"))] = events
    if not ranks:
        raise TimelineError(f"{folder}: holds no readable event ({damaged} damaged lines)")
    origin = min(_start(event) for events in ranks.values() for event in events)
    trace = [entry for rank, events in sorted(ranks.items()) for entry in _track(rank, events, origin)]
    return {"displayTimeUnit": "ms", "traceEvents": trace}, damaged


def write_timeline(trace: dict[str, Any], path: Path) -> None:
    """Write a trace, gzipped if the name ends in .gz. Raises OSError, also for a file that is no trace of this program."""
    _refuse_foreign(path)
    make_folder(path.parent)
    content = json.dumps(trace).encode()
    replace_file(path, gzip.compress(content) if path.suffix == ".gz" else content)


def _refuse_foreign(path: Path) -> None:
    if path.suffix == ".gz" and path.is_file():
        try:
            with gzip.open(path) as file:
                if file.read(len(_START)) == _START:
                    return
        except (gzip.BadGzipFile, EOFError, zlib.error):
            pass
    refuse_foreign_file(path, _START)


def _read(path: Path) -> tuple[list[dict[str, Any]], int]:
    try:
        if not path.stem.removeprefix("rank-").isdecimal():
            raise TimelineError(f"{path}: is not named by a rank (move it elsewhere)")
        lines = read_regular(path, _LARGEST_FILE).decode(errors="replace").splitlines()
    except OSError as error:
        raise TimelineError(f"{path}: cannot be read: {error.strerror}") from error
    events = [event for event in map(_parse, lines) if event is not None]
    return events, sum(bool(line.strip()) for line in lines) - len(events)


def _parse(line: str) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
        needed = {
            "session": {"time": float, "host": str, "world_size": int},
            "phase": {"name": str, "step": int, "start": float, "duration": float},
            "fault": {"time": float, "step": int, "phase": str, "text": str},
        }[event["event"]]
        return event if all(isinstance(event[key], kind) for key, kind in needed.items()) else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _start(event: dict[str, Any]) -> float:
    return event["start"] if event["event"] == "phase" else event["time"]


def _track(rank: int, events: list[dict[str, Any]], origin: float) -> list[dict[str, Any]]:
    host = next((event["host"] for event in events if event["event"] == "session"), "unknown host")
    place = {"pid": rank, "tid": 0}
    entries = [
        {"ph": "M", "name": "process_name", **place, "args": {"name": f"rank {rank} ({host})"}},
        {"ph": "M", "name": "process_sort_index", **place, "args": {"sort_index": rank}},
        {"ph": "M", "name": "thread_name", **place, "args": {"name": "train loop"}},
    ]
    for event in events:
        at = {**place, "ts": (_start(event) - origin) * 1e6}
        if event["event"] == "phase":
            entries.append({
                "ph": "X", "cat": "phase", "name": event["name"], **at, "dur": event["duration"] * 1e6,
                "args": {"step": event["step"]},
            })  # fmt: skip
        elif event["event"] == "fault":
            details = {key: event[key] for key in ("text", "step", "phase")}
            entries.append({"ph": "i", "s": "g", "cat": "fault", "name": "fault", **at, "args": details})
        else:
            name = f"session of {event['world_size']} ranks"
            entries.append({"ph": "i", "s": "p", "cat": "session", "name": name, **at, "args": {}})
    return entries
