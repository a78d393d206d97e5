"""Processes of this machine: their states, children and command lines."""

import os
from contextlib import suppress
from pathlib import Path


def children(pid: int) -> list[int]:
    return [int(child) for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()]


def descendants(pid: int) -> list[int]:
    return [each for child in children(pid) for each in (child, *descendants(child))]


def trainings_in(folder: Path) -> dict[int, list[str]]:
    """Words of every process with train.py and the folder in its command line, by its id."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            line = path.read_text()
            if "train.py" in line and str(folder) in line:
                found[int(path.parent.name)] = line.split("\0")
    return found


def process_state(pid: int) -> str:
    """State of a process of this machine: `running`, `stopped` or `gone`."""
    try:
        # The name in parentheses may hold anything; the state is the letter after it.
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "gone" if Path("/proc/self/stat").exists() else _state_by_signal(pid)
    except (OSError, IndexError):
        return "running"
    return {"Z": "gone", "X": "gone", "T": "stopped", "t": "stopped"}.get(letter, "running")


def _state_by_signal(pid: int) -> str:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return "gone"
    except PermissionError:
        pass
    return "running"
