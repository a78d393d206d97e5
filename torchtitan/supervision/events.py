"""Events of each rank: a line of JSON per phase and per fault, in `<run>/events/rank-0000.jsonl`.

    {"event": "session", "time": s, "rank": r, "world_size": w, "layout": l, "host": h, "pid": p, "step": done before}
    {"event": "phase", "name": n, "step": k, "start": s, "duration": s}
    {"event": "fault", "time": s, "step": k, "phase": n, "text": t}

Times are seconds since 1970. A run that resumes appends a session to the file: it records all work, also repeated
steps.
"""

import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from torchtitan.files.patient_file import PatientFile
from torchtitan.supervision.phases import LONG_PHASES

EVENTS_FOLDER = "events"
_MOST_WAITING = 1000  # phases in memory


class EventLog:
    """Event log of one rank. A failing disk loses the oldest events, not the run."""

    def __init__(
        self, run_folder: Path, *, rank: int, world_size: int, keep_every: int, step: int, layout: str = ""
    ) -> None:
        """
        Args:
            run_folder: of the run.
            rank, world_size: this process's place.
            keep_every: phases of steps that are a multiple of it are kept, and of step 1; the long ones always.
            step: optimizer steps done before this session.
            layout: in words.
        """
        path = run_folder / EVENTS_FOLDER / f"rank-{rank:04d}.jsonl"
        # The watchdog writes from a thread of its own.
        self._file = PatientFile(
            path, "the record of events", prepare=lambda: _end_cut_line(path), may_lose=True
        )
        self._keep_every = keep_every
        self._waiting: list[tuple[str, int, int, int]] = []
        self._epoch = time.time_ns() - time.perf_counter_ns()
        self._append([{
            "event": "session", "time": time.time(), "rank": rank, "world_size": world_size, "layout": layout,
            "host": socket.gethostname(), "pid": os.getpid(), "step": step,
        }])  # fmt: skip

    def phase(self, name: str, step: int, start: int, duration: int) -> None:
        """Record a phase that has ended; start and duration in nanoseconds of time.perf_counter_ns."""
        if step % self._keep_every == 0 or step == 1 or name in LONG_PHASES:
            self._waiting.append((name, step, start, duration))
            if len(self._waiting) >= _MOST_WAITING:
                self.flush()

    def flush(self) -> None:
        """Flush the waiting events."""
        waiting, self._waiting = self._waiting, []
        if waiting:
            self._append([
                {
                    "event": "phase", "name": name, "step": step,
                    "start": (self._epoch + start) / 1e9, "duration": duration / 1e9,
                }
                for name, step, start, duration in waiting
            ])  # fmt: skip

    def fault(self, text: str, step: int, phase: str) -> None:
        """Record a fault, and flush the waiting events."""
        self.flush()
        self._append([{"event": "fault", "time": time.time(), "step": step, "phase": phase, "text": text}])

    def sync(self) -> None:
        """Sync the events to the disk, if it allows; any thread may call it."""
        self._file.sync()

    def _append(self, lines: list[dict[str, Any]]) -> None:
        for line in lines:
            self._file.add(json.dumps(line).encode() + b"\n")


def _end_cut_line(path: Path) -> None:
    """Break the line where a kill has cut off the last one."""
    try:
        file = open(path, "r+b")
    except FileNotFoundError:
        return
    with file:
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
