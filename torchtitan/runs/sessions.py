"""Sessions of a run: its starts and resumes, from the first rank's record of events."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_EVENTS = Path("events") / "rank-0000.jsonl"
_LONGEST_LINE = 1 << 16  # bytes; no session has a longer one


def steps_of_earlier_layouts(folder: Path) -> int:
    """Optimizer steps done before the last session's layout took over; 0 where nothing is known of another one.

    Layouts are compared by number of processes, and by their description where both sessions have one.
    """
    last: dict[str, Any] | None = None
    begun = 0
    for session in _sessions(folder / _EVENTS):
        differs = last is not None and _differ(last, session)
        begun = session["step"] if differs else min(begun, session["step"])
        last = session
    return begun


def _differ(one: dict[str, Any], other: dict[str, Any]) -> bool:
    if one.get("world_size") != other.get("world_size"):
        return True
    layouts = one.get("layout"), other.get("layout")
    return all(layouts) and layouts[0] != layouts[1]


def _sessions(path: Path) -> Iterator[dict[str, Any]]:
    """Sessions in their order; of a file that cannot be read none, and none of damaged lines."""
    try:
        with open(path, "rb") as file:
            while line := file.readline(_LONGEST_LINE):
                if b'"session"' in line and (session := _session(line)):
                    yield session
    except OSError:
        return


def _session(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or found.get("event") != "session":
        return None
    step = found.get("step")
    return found if type(step) is int and 0 <= step < 2**63 else None
