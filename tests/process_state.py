"""State of a process of this machine."""

import os
from pathlib import Path


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
