"""Supervision of a process while it trains: watchdog, garbage control, and who closes a run that fails."""

import json
import logging
import time
from collections.abc import Callable
from contextlib import ExitStack

from torchtitan.files.regular import read_regular
from torchtitan.processes.exit_codes import FAILED
from torchtitan.runs.status import STATUS_FILE, write_status
from torchtitan.state.run_state import RunState
from torchtitan.supervision.garbage import GarbageControl
from torchtitan.supervision.watchdog import Watchdog
from torchtitan.training.clock import Phases

logger = logging.getLogger(__name__)

_WAIT = 1.0  # seconds for the rank that failed first, or for the first rank, to write the status
_LARGEST_STATUS = 1 << 20  # bytes


class Supervision:
    """Supervision around the training of one process. Nothing here is collective."""

    def __init__(self, state: RunState, phases: Phases, close_summary: Callable[[str, str], None]) -> None:
        """close_summary: closes the run's summary with a status and a reason."""
        config, layout = state.config, state.layout
        self._close_summary = close_summary
        self._folder, self._rank, self._alone = state.folder.path, layout.rank, layout.world_size == 1
        # Every forward is progress, also in the many of a validation or of a sampler.
        state.model.register_forward_pre_hook(phases.touch)
        self._garbage = GarbageControl()
        self._watchdog = Watchdog(
            phases, config.comm, self._folder, rank=layout.rank, world_size=layout.world_size,
            compiles=config.compile.enable, on_end=self._hung,
        )  # fmt: skip
        self._stack = ExitStack()
        self.has_failed = False  # and said so, here or by another rank

    def __enter__(self) -> "Supervision":
        self._stack.enter_context(self._garbage)
        self._stack.enter_context(self._watchdog)
        return self

    def __exit__(self, *details) -> bool | None:
        return self._stack.__exit__(*details)

    def first_step_done(self) -> None:
        """End start-up: the watchdog's limits become the short ones."""
        self._watchdog.first_step_done()

    def step_done(self, step: int) -> None:
        """End a step."""
        self._garbage.step(step)

    def failed(self, status: str, reason: str, lost: bool) -> None:
        """Log why this rank ends, and close the run unless another rank has.

        Args:
            lost: whether another rank's end is the cause; its own reason, if it has given one, is added.
        """
        self.has_failed, known = True, self._known_reason(wait=lost)
        if lost and known:
            reason = f"{reason}; {known}"
        ranked = f"rank {self._rank}: {reason}"
        logger.error(reason if self._alone else ranked)
        self._close_run(status, ranked if self._rank else reason, known)

    def _hung(self, reason: str) -> None:
        self._close_run("failed", reason, self._known_reason(wait=False))

    def _close_run(self, status: str, reason: str, known: str | None) -> None:
        write_status(None if known else self._folder, "failed", FAILED, reason)
        if not known:
            self._close_summary(status, reason)

    def _known_reason(self, wait: bool) -> str | None:
        """Reason with which another rank has closed the run; None if none has.

        The first rank to fail closes it. The others give the first rank some time, so that one writes for all.
        """
        deadline = time.monotonic() + (_WAIT if wait or self._rank else 0.0)
        while True:
            try:
                return str(json.loads(read_regular(self._folder / STATUS_FILE, _LARGEST_STATUS))["reason"])
            except (OSError, ValueError, KeyError, TypeError):
                if time.monotonic() >= deadline:
                    return None
            time.sleep(0.05)
