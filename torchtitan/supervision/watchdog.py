"""Watchdog: ends a hung process with a message, so that no hang is silent.

A thread looks at the phase of the train loop. Near the end of the phase's time limit, it writes one line to stderr, and
stacks and the last collectives to `<run>/faults/`; at the end it closes the summary and ends the process. It works
while the interpreter lock is free, as it is in a collective, in a kernel and in waiting for data. A process that holds
the lock, or is stopped, leaves no stacks: by that the others name it.
"""

import faulthandler
import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path

import torch

from torchtitan.distributed.config import CommConfig
from torchtitan.pictures.number_text import first_named
from torchtitan.processes.exit_codes import FAILED
from torchtitan.training.clock import LONG_PHASES, Phases

FAULTS_FOLDER = "faults"
_STACKS = re.compile(r"rank-(\d{4,})-.+-stacks\.txt")
_PATIENCE = 5.0  # seconds
_MOST_NAMED = 8  # ranks
_LONG = 6  # limit of long phases over comm.init_timeout_seconds
_CLOCK_ERROR = 1.0  # seconds between this machine's clock and the file system's


@dataclass(frozen=True)
class Limits:
    """Limits of a phase's duration.

    Attributes:
        report, end: seconds until the process reports its phase, and until it is ended.
        key: of the configuration, to raise if that was too short.
    """

    report: float
    end: float
    key: str


def limits(comm: CommConfig, phase: str, *, alone: bool, first_step: bool, compiles: bool) -> Limits:
    """Limits for a phase.

    The end comes before the collectives' own timeout, after which NCCL would abort the process without a message.

    Args:
        alone: whether it is the run's only process: no other waits for it, and it may just be slow.
        first_step: whether this process has yet to finish its first step.
    """
    key = "comm.init_timeout_seconds" if first_step else "comm.train_timeout_seconds"
    short = comm.init_timeout_seconds if first_step else comm.train_timeout_seconds
    margin = min(20.0, 0.2 * short)
    long = max(_LONG * comm.init_timeout_seconds, short)
    if phase in LONG_PHASES:
        return Limits(0.8 * long, 0.9 * long, "comm.init_timeout_seconds")
    if alone or (first_step and compiles):
        return Limits(short - margin, 0.9 * long, "comm.init_timeout_seconds")
    return Limits(short - margin, short - margin / 2, key)


class Watchdog:
    """Watchdog over the phases of one process."""

    def __init__(
        self, phases: Phases, comm: CommConfig, run_folder: Path, *, rank: int, world_size: int, compiles: bool,
        on_end: Callable[[str], None], end_process: Callable[[int], None] = os._exit,
    ) -> None:  # fmt: skip
        """on_end: called with the reason before the process is ended; may write the summary."""
        self.interval = max(0.1, min(5.0, comm.train_timeout_seconds / 20, comm.init_timeout_seconds / 20))
        self._phases, self._comm, self._folder = phases, comm, run_folder / FAULTS_FOLDER
        self._rank, self._world_size, self._compiles = rank, world_size, compiles
        self._on_end, self._end_process = on_end, end_process
        self._first_step = True
        self._reported_at: int | None = None  # `since` of the standstill that was reported
        self._last_look = phases.clock()
        self._resumed_at = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._repeat, name="watchdog", daemon=True)
        self._began = time.time()

    def __enter__(self) -> "Watchdog":
        self._last_look, self._began = self._phases.clock(), time.time()
        self._thread.start()
        return self

    def __exit__(self, *details: object) -> None:
        """Stop watching. Does not return if the thread is just ending the process."""
        self._stop.set()
        self._thread.join()

    def first_step_done(self) -> None:
        """End start-up: from now on the limits are those of steady training."""
        self._first_step = False

    def look(self) -> None:
        """Check the phase once; called by the thread."""
        phases, now = self._phases, self._phases.clock()
        if now - self._last_look > 1e9 * (5 * self.interval + 1):
            self._resumed_at = now  # this process was itself stopped, or the machine asleep: count anew
        self._last_look = now
        since, phase = phases.since, phases.name
        stood = (now - max(since, self._resumed_at)) / 1e9
        limit = limits(
            self._comm, phase, alone=self._world_size == 1, first_step=self._first_step, compiles=self._compiles
        )
        if stood >= limit.report and self._reported_at != since:
            self._reported_at = since
            _within_patience(self._report, phase, stood, limit)
        elif stood >= limit.end:
            self._end(phase, stood, limit)

    def _repeat(self) -> None:
        while not self._stop.wait(self.interval):
            self.look()

    def _report(self, phase: str, stood: float, limit: Limits) -> None:
        left = max(limit.end - stood, 0.0)
        text = f"{self._where(phase, stood)}; ends in {left:.3g} s unless it continues ({limit.key} sets the limit)"
        _say(f"{text}; {dump_state(self._folder, self._rank)}")

    def _end(self, phase: str, stood: float, limit: Limits) -> None:
        _within_patience(self._close, phase, stood, limit)
        self._end_process(FAILED)

    def _close(self, phase: str, stood: float, limit: Limits) -> None:
        silent = _named(silent_ranks(self._folder, self._world_size, self._began - _CLOCK_ERROR))
        reason = "; ".join([self._where(phase, stood), *silent, f"ended by the limit ({limit.key})"])
        _say(reason)
        self._on_end(reason)

    def _where(self, phase: str, stood: float) -> str:
        return f"rank {self._rank} ({socket.gethostname()}): step {self._phases.step}: {stood:.3g} s in {phase}"


def _say(text: str) -> None:
    with suppress(OSError):  # nobody reads it any more
        print(text, file=sys.stderr, flush=True)


def silent_ranks(folder: Path, world_size: int, since: float) -> list[int]:
    """Ranks without stacks since a time in `<run>/faults`, which all ranks share, while others wait for them."""
    reported = set()
    with suppress(OSError):
        for path in folder.iterdir():
            if (found := _STACKS.fullmatch(path.name)) and path.stat().st_mtime >= since:
                reported.add(int(found[1]))
    return sorted({*range(world_size)} - reported)


def _named(silent: list[int]) -> list[str]:
    if not silent:
        return []
    ranks = first_named([f"rank {rank}" for rank in silent], _MOST_NAMED)
    return [f"no report of {ranks}: stopped, gone, or holding the interpreter's lock"]


def _within_patience(work: Callable[..., None], *arguments: object) -> None:
    """Run an action that may hang as well, on a file system; give it up after a while."""
    thread = threading.Thread(target=work, args=arguments, daemon=True)
    thread.start()
    thread.join(_PATIENCE)


def dump_state(folder: Path, rank: int) -> str:
    """Dump every thread's Python stack, and the collectives that were recorded; return a summary."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    stacks = folder / f"rank-{rank:04d}-{stamp}-stacks.txt"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(stacks, "w") as file:
            faulthandler.dump_traceback(file, all_threads=True)
        collectives = last_collectives()
        if collectives is None:
            return f"stacks: {stacks}; the back end has recorded no collectives"
        record = folder / f"rank-{rank:04d}-{stamp}-collectives.json"
        record.write_bytes(collectives)
        return f"stacks: {stacks}; collectives: {record}"
    except OSError as error:
        return f"stacks cannot be written: {error}"


def last_collectives() -> bytes | None:
    """Last collectives of torch's flight recorders as JSON, by time; None if they recorded none.

    A build with CUDA has one recorder for NCCL and another for gloo, which both leave `entries` out while they are empty.
    """
    if os.environ.get("TORCH_FR_BUFFER_SIZE", "0") == "0":
        return None
    module = getattr(torch._C, "_distributed_c10d", None)
    dumps = [getattr(module, name, None) for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json")]
    records = [record for record in (json.loads(dump()) for dump in dumps if dump) if record.get("entries")]
    entries = [entry for record in records for entry in record["entries"]]
    entries.sort(key=itemgetter("time_created_ns"))
    return json.dumps(records[0] | {"entries": entries}).encode() if records else None
