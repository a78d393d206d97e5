"""Heartbeats: every rank records its position, and the others read it to find a missing rank.

    <run>/faults/heartbeat/rank-0000.json    of a rank, on one machine
    <run>/faults/heartbeat/node-0000.json    of all ranks of a machine, of several; rank 0 has written it

Small files instead of the process group's store: they can be read even if the process that holds the store hangs.
Across machines this needs a shared run folder, as checkpoints do: there the ranks of a machine write into a folder in its
memory, and the lowest of them that runs writes what it finds there, so that the shared disk sees one file per machine.
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
from torchtitan.processes.launch import launch_number
from torchtitan.supervision.node_folder import node_folder

FAULTS_FOLDER = "faults"
_HEARTBEAT = re.compile(r"(rank|node)-\d{4,}\.(json|tmp)")
STALE_AFTER = 4.0  # intervals without a heartbeat after which a rank of another machine counts as silent


@dataclass(frozen=True)
class Beat:
    """Heartbeat of a rank: its last known position.

    Attributes:
        rank, host, pid: of the process.
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
    """Heartbeats of one run."""

    def __init__(
        self, run_folder: Path, rank: int, world_size: int, interval: float, ranks_here: int | None = None
    ) -> None:
        """
        Args:
            run_folder: of the run.
            rank, world_size: this process's place.
            interval: seconds between the heartbeats of a rank.
            ranks_here: processes of this machine; None: as the launcher says, or all.
        """
        self._folder = _heartbeat_folder(run_folder)
        self._rank = rank
        self._interval = interval
        self._host = socket.gethostname()
        self._wrote = False  # for its machine
        self._here = self._folder  # of this rank's own file
        if (ranks_here or launch_number("LOCAL_WORLD_SIZE", world_size)) < world_size:
            with suppress(OSError):  # without it, every rank writes to the shared folder
                self._here = node_folder(run_folder, _is_heartbeat)

    def beat(self, step: int, phase: str, changes: int, ended: str | None = None) -> None:
        """Write this rank's position. A failing disk is ignored: training must not end by it."""
        beat = Beat(self._rank, self._host, os.getpid(), step, phase, changes, time.time(), ended)
        _replace(self._path(self._here), asdict(beat))
        if self._here == self._folder:
            return
        found = _beats(self._here, "rank")
        if ended or self._writes_for(found):
            self._wrote = True
            _replace(self._path(self._folder, "node"), [asdict(beat) for _, beat in sorted(found.items())])
        elif self._wrote:  # a lower rank writes by now
            self._wrote = False
            with suppress(OSError):
                self._path(self._folder, "node").unlink(missing_ok=True)

    def read(self) -> dict[int, Beat]:
        """Read the last heartbeat of each rank that has one."""
        found = _beats(self._folder, "rank")
        others = [] if self._here == self._folder else [_beats(self._folder, "node"), _beats(self._here, "rank")]
        for beat in (beat for beats in others for beat in beats.values()):
            if beat.rank not in found or found[beat.rank].time < beat.time:
                found[beat.rank] = beat
        return dict(sorted(found.items()))

    def culprit(self) -> str | None:
        """Culprit: the rank that holds the others up and the reason, in words; None if the heartbeats do not show it.
        """
        return find_culprit(self.read(), self._rank, self._state)

    def certain_culprit(self, wait: float) -> str | None:
        """Certain culprit: as `culprit`, for a rank that is gone, stopped or has ended; waits that many seconds for it
        to show.
        """
        deadline = time.monotonic() + wait
        while True:
            found = find_culprit(self.read(), self._rank, self._state, behind=False)
            if found or time.monotonic() >= deadline:
                return found
            time.sleep(0.1)

    def writes_summary(self) -> bool:
        """True on the rank that closes the summary of a failed run: the lowest that is not gone or stopped."""
        beats = self.read()
        return all(
            self._state(beats[rank]) != "running" and not beats[rank].ended for rank in range(self._rank) if rank in beats
        )

    def remove(self) -> None:
        """Remove the heartbeats after a successful run."""
        with suppress(OSError):  # others' heartbeats, the stacks of a fault, or a disk that is read-only by now
            self._path(self._here).unlink(missing_ok=True)
            if self._here != self._folder:
                with suppress(OSError):
                    self._here.rmdir()
                self._path(self._folder, "node").unlink(missing_ok=True)
            self._folder.rmdir()
            self._folder.parent.rmdir()

    def _path(self, folder: Path, kind: str = "rank") -> Path:
        return folder / f"{kind}-{self._rank:04d}.json"

    def _writes_for(self, found: dict[int, Beat]) -> bool:
        """Whether this rank writes for its machine: no lower one there runs and still writes."""
        fresh = time.time() - STALE_AFTER * self._interval
        lower = [beat for rank, beat in found.items() if rank < self._rank and not beat.ended and beat.time > fresh]
        return all(self._state(beat) != "running" for beat in lower)

    def _state(self, beat: Beat) -> str:
        if beat.host == self._host:
            return process_state(beat.pid)
        silent = time.time() - beat.time
        return f"silent for {silent:.0f} s" if silent > STALE_AFTER * self._interval else "running"


def remove_heartbeats(run_folder: Path) -> None:
    """Remove the heartbeats of an earlier attempt; by the first rank, before any rank writes."""
    with suppress(OSError):  # they are replaced one by one
        remove_folder(_heartbeat_folder(run_folder), _is_heartbeat)


def _is_heartbeat(name: str) -> bool:
    return _HEARTBEAT.fullmatch(name) is not None


def _heartbeat_folder(run_folder: Path) -> Path:
    return run_folder / FAULTS_FOLDER / "heartbeat"


def _beats(folder: Path, kind: str) -> dict[int, Beat]:
    """Newest heartbeat of each rank in the files of a kind; what is damaged is left out."""
    found: dict[int, Beat] = {}
    for path in sorted(folder.glob(f"{kind}-*.json")):
        try:
            content = json.loads(path.read_bytes())
            beats = [Beat(**fields) for fields in ([content] if kind == "rank" else content)]
        except (OSError, ValueError, TypeError):
            continue
        for beat in beats:
            if beat.rank not in found or found[beat.rank].time < beat.time:
                found[beat.rank] = beat
    return found


def _replace(path: Path, content: dict | list) -> None:
    temporary, text = path.with_suffix(".tmp"), json.dumps(content)
    with suppress(OSError):
        try:
            temporary.write_text(text)
        except FileNotFoundError:  # the first; asked for each time, a shared disk would do twice the work
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(text)
        temporary.replace(path)


def find_culprit(
    beats: dict[int, Beat], own_rank: int, state: Callable[[Beat], str], behind: bool = True
) -> str | None:
    """Find the rank that the others wait for, by the heartbeats.

    A rank that is gone without a message comes first, then one that is stopped or silent, then the first that has ended
    itself, since the others failed by its end; last, if `behind`, a running one that is behind the others.

    Args:
        beats: last heartbeat by rank.
        own_rank: of the process that asks.
        state: "running", or the other state of a rank's process.

    Returns:
        one clause, as `rank 1 (node7, process 4711) is gone, last seen at step 12 in backward`; None if no rank is at
        fault.
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
