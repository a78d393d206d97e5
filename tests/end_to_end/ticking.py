"""Training under a clock that ticks once per reading, in a process that can kill itself after a step."""

import os
import signal
import threading
from unittest.mock import patch

from torchtitan.config.job import load_config
from torchtitan.trainer import Trainer
from torchtitan.training.clock import RunClock

TICK = 1_000_000  # nanoseconds


class TickingClock:
    """A tick per reading of the train loop's thread; the watchdog's readings change nothing."""

    def __init__(self) -> None:
        self._time = 0

    def __call__(self) -> int:
        if threading.current_thread() is threading.main_thread():
            self._time += TICK
        return self._time


def train(arguments: list[str], kill_after: int) -> int:
    """Train by the ticking clock; the process kills itself within that step's report."""
    trainer = Trainer(load_config(arguments, 1), RunClock(TickingClock()))
    advance = trainer.reports.advance

    def advance_or_die() -> None:
        if trainer.state.step == kill_after:
            os.kill(os.getpid(), signal.SIGKILL)
        advance()

    try:
        with patch.object(trainer.reports, "advance", advance_or_die):
            return trainer.train()
    finally:
        trainer.close()
