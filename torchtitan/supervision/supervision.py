"""Supervision of a process while it trains: event log, watchdog, garbage control, memory monitor."""

import multiprocessing
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack

from torchtitan.processes.exit_codes import FAILED
from torchtitan.runs.status import write_status
from torchtitan.state.run_state import RunState
from torchtitan.supervision.events import EventLog
from torchtitan.supervision.garbage import GarbageControl
from torchtitan.supervision.heartbeat import process_state
from torchtitan.supervision.phases import Phases
from torchtitan.supervision.watchdog import Watchdog
from torchtitan.training.hardware import memory_metrics
from torchtitan.training.memory_monitor import MemoryMonitor


class Supervision:
    """Supervision around the training of one process. Nothing here is collective."""

    def __init__(self, state: RunState, phases: Phases, close_summary: Callable[[str, str], None]) -> None:
        """
        Args:
            state: of the run.
            phases: of its loop.
            close_summary: closes the run's summary with a status and a reason.
        """
        config, layout = state.config, state.layout
        self._phases, self._close_summary = phases, close_summary
        self._folder, self._device = state.folder.path, layout.device
        self._log: EventLog | None = None
        if config.metrics.enable_events:
            self._log = EventLog(
                self._folder, rank=layout.rank, world_size=layout.world_size,
                keep_every=config.metrics.log_freq, step=state.step, layout=layout.describe(),
            )  # fmt: skip
            phases.on_end = self._log.phase
        # Every forward is progress, also in the many of a validation or of a sampler.
        state.model.register_forward_pre_hook(phases.touch)
        self._garbage = GarbageControl(config.training.gc_freq)
        self._memory = MemoryMonitor(layout.rank)
        self._watchdog = Watchdog(
            phases, config.comm, self._folder, rank=layout.rank, world_size=layout.world_size,
            compiles=config.compile.enable, describe=_waiting_for, on_fault=self._note, on_end=self._close_run,
        )  # fmt: skip
        self._stack = ExitStack()

    def __enter__(self) -> "Supervision":
        self._stack.enter_context(self._garbage)
        self._stack.enter_context(self._watchdog)
        return self

    def __exit__(self, *details) -> bool | None:
        if self._log:
            self._log.flush()
        return self._stack.__exit__(*details)

    def first_step_done(self) -> None:
        """End start-up: the watchdog's limits become the short ones."""
        self._watchdog.first_step_done()

    def step_done(self, step: int, logged: bool) -> None:
        """End a step; logged: whether its metrics were."""
        self._garbage.step(step)
        if logged:
            self._memory.check(memory_metrics(self._device))
            if self._log:
                self._log.flush()

    def sync(self) -> None:
        """Sync this rank's events to the disk, if it allows; any thread may call it, during training."""
        if self._log:
            self._log.sync()

    def culprit(self, wait: float) -> str | None:
        """Culprit: another rank that is gone, stopped or has failed, in words; waits that many seconds for it to show.
        """
        heartbeats = self._watchdog.heartbeats
        return heartbeats.certain_culprit(wait) if heartbeats else None

    def failed(self, status: str, reason: str) -> None:
        """Close a failed run: its summary and status, the events, and a message for the other ranks."""
        self._note(reason)
        self._close_run(reason, status)
        self._watchdog.ended(reason)

    def _note(self, text: str) -> None:
        if self._log:
            self._log.fault(text, self._phases.step, self._phases.where)

    def _close_run(self, reason: str, status: str = "failed") -> None:
        heartbeats = self._watchdog.heartbeats
        closes = heartbeats is None or heartbeats.writes_summary()
        write_status(self._folder if closes else None, "failed", FAILED, reason)
        if closes:
            self._close_summary(status, reason)


def _waiting_for(phase: str) -> str:
    if phase != "data":
        return ""
    workers = [child for child in multiprocessing.active_children() if child.pid]
    if not workers:
        return ""
    states = {pid: process_state(pid) for child in workers if (pid := child.pid)}
    odd = [f"process {pid} is {state}" for pid, state in states.items() if state != "running"]
    counts = ", ".join(f"{count} {state}" for state, count in Counter(states.values()).items())
    return f"of its loader processes {counts}" + (f" ({', '.join(odd)})" if odd else "")
