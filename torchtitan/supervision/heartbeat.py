"""Which rank is missing: every rank writes down where it stands, and the others read it when they wait too long.

    <run>/faults/heartbeat/rank-0000.json

Small files rather than the process group's store: they can be read when the process that holds the store is the one
that hangs. Across machines this needs what checkpoints need too, a run folder that all of them share.
"""

import json
import os
import re
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from torchtitan.files.removal import remove_folder

FAULTS_FOLDER = "faults"
_HEARTBEAT = re.compile(r"rank-\d{4,}\.(json|tmp)")
STALE_AFTER = 4.0  # intervals without a heartbeat after which a rank of another machine counts as silent


@dataclass(frozen=True)
class Beat:
    """Where a rank stood.

    Attributes:
        rank, host, pid: who.
        step, phase: optimizer step and phase.
        changes: phases entered and left so far, comparable between ranks.
        time: of writing, seconds since 1970.
        ended: why the process ended itself; None while it runs.
    """

    rank: int
    host: str
    pid: int
    step: int
    phase: str
    changes: int
    time: float
    ended: str | None = None

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host}, process {self.pid})"


class Heartbeats:
    """The heartbeats of one run."""

    def __init__(self, run_folder: Path, rank: int, world_size: int, interval: float) -> None:
        """interval: seconds between the heartbeats of a rank."""
        self._folder = _heartbeat_folder(run_folder)
        self._rank = rank
        self._world_size = world_size
        self._interval = interval
        self._host = socket.gethostname()

    def beat(self, step: int, phase: str, changes: int, ended: str | None = None) -> None:
        """Write where this rank stands. A disk that cannot be written is passed over: training must not end by it."""
        beat = Beat(self._rank, self._host, os.getpid(), step, phase, changes, time.time(), ended)
        path = self._path(self._rank)
        temporary = path.with_suffix(".tmp")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps(asdict(beat)))
            temporary.replace(path)
        except OSError:
            pass

    def read(self) -> dict[int, Beat]:
        """The last heartbeat of each rank that has one."""
        found = {}
        for rank in range(self._world_size):
            try:
                found[rank] = Beat(**json.loads(self._path(rank).read_bytes()))
            except (OSError, ValueError, TypeError):
                continue
        return found

    def culprit(self) -> str | None:
        """Which rank holds the others up and why, in words; None if the heartbeats do not tell."""
        return find_culprit(self.read(), self._rank, self._state)

    def certain_culprit(self, wait: float) -> str | None:
        """Like `culprit`, of a rank that is gone, stopped or has ended; waits that many seconds for it to show."""
        deadline = time.monotonic() + wait
        while True:
            found = find_culprit(self.read(), self._rank, self._state, behind=False)
            if found or time.monotonic() >= deadline:
                return found
            time.sleep(0.1)

    def writes_summary(self) -> bool:
        """Whether this is the rank that closes the summary of a failed run: the lowest that is not gone or stopped."""
        beats = self.read()
        return all(
            self._state(beats[rank]) != "running" and not beats[rank].ended for rank in range(self._rank) if rank in beats
        )

    def remove(self) -> None:
        """After a run that went well: nobody is missing."""
        with suppress(OSError):  # others' heartbeats, the stacks of a fault, or a disk that is read-only by now
            self._path(self._rank).unlink(missing_ok=True)
            self._folder.rmdir()
            self._folder.parent.rmdir()

    def _path(self, rank: int) -> Path:
        return self._folder / f"rank-{rank:04d}.json"

    def _state(self, beat: Beat) -> str:
        if beat.host == self._host:
            return process_state(beat.pid)
        silent = time.time() - beat.time
        return f"silent for {silent:.0f} s" if silent > STALE_AFTER * self._interval else "running"


def remove_heartbeats(run_folder: Path) -> None:
    """Forget the ranks of an attempt before; by the first rank, before any writes its own."""
    with suppress(OSError):  # they are replaced one by one
        remove_folder(_heartbeat_folder(run_folder), lambda name: _HEARTBEAT.fullmatch(name) is not None)


def _heartbeat_folder(run_folder: Path) -> Path:
    return run_folder / FAULTS_FOLDER / "heartbeat"


def find_culprit(
    beats: dict[int, Beat], own_rank: int, state: Callable[[Beat], str], behind: bool = True
) -> str | None:
    """Judge by the heartbeats which rank the others wait for.

    A rank that is gone without a word comes first, then one that is stopped or silent, then the first that has ended
    itself, for its end is what the others saw; last, if `behind`, a running one that has come less far than others.

    Args:
        beats: last heartbeat by rank.
        own_rank: of the process that asks.
        state: "running", or what else has become of a rank's process.

    Returns:
        one clause, as `rank 1 (node7, process 4711) is gone, last seen at step 12 in backward`; None if no rank
        stands out.
    """
    others = [beat for rank, beat in sorted(beats.items()) if rank != own_rank]
    states = {beat.rank: state(beat) for beat in others}
    lost = [beat for beat in others if not beat.ended and states[beat.rank] != "running"]
    lost.sort(key=lambda beat: states[beat.rank] != "gone")
    if lost:
        return "; ".join(
            f"{beat} is {states[beat.rank]}, last seen at step {beat.step} in {beat.phase}" for beat in lost
        )
    ended = [beat for beat in others if beat.ended]
    if ended:
        first = min(ended, key=lambda beat: beat.time)
        return f"{first} ended: {first.ended}"
    if not behind or not beats:
        return None
    farthest = max(beat.changes for beat in beats.values())
    late = [beat for beat in beats.values() if beat.changes < farthest]
    return "; ".join(f"{beat} is behind, at step {beat.step} in {beat.phase}" for beat in late) or None


def process_state(pid: int) -> str:
    """What a process of this machine does: `running`, `stopped` or `gone`."""
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
