"""Run of a cell on the machine that it was given: the search of its batch size, if requested, and the training."""

import threading
import time
from dataclasses import replace
from pathlib import Path

from torchtitan.config.job import ConfigError
from torchtitan.errors import unwrapped
from torchtitan.experiments.autotune.candidates import AutotuneRefused
from torchtitan.experiments.autotune.probe import ProbeFailed
from torchtitan.experiments.autotune.record import RecordError
from torchtitan.experiments.autotune.tuning import NothingFits, autotune
from torchtitan.experiments.grid import BATCH_KEY, SweepSettings
from torchtitan.experiments.outcome import Outcome, Status
from torchtitan.experiments.process import run_processes

# What a cell is called of which no batch size was found.
_STATUS: dict[type[Exception], Status] = {
    NothingFits: "oom", ConfigError: "refused", AutotuneRefused: "refused", ProbeFailed: "failed", RecordError: "failed",
}  # fmt: skip


def run_cell(
    arguments: list[str], processes: int, settings: SweepSettings, cache: Path, log: Path, environment: dict[str, str], *,
    devices: list[int] | None, stop: threading.Event | None,
) -> Outcome:  # fmt: skip
    """Run a cell once; a searched batch size is in the outcome's `chosen`. Raises Stopped: `stop` was set."""
    begun, chosen = time.perf_counter(), {}
    if settings.autotune:
        try:
            found = autotune(
                arguments, processes, memory_gib=settings.autotune_memory_gib, cache=cache,
                multiple_of=settings.autotune_multiple_of, timeout_s=settings.timeout_s, devices=devices, stop=stop,
            )  # fmt: skip
        except tuple(_STATUS) as error:
            status = "killed" if isinstance(error, ProbeFailed) and error.outcome.status == "killed" else _STATUS[type(error)]
            return Outcome(status, unwrapped(error), time.perf_counter() - begun)
        chosen = {BATCH_KEY: found.batch_size}
        arguments = [*arguments, f"--{BATCH_KEY}={found.batch_size}"]
    outcome = run_processes(
        arguments, processes=processes, timeout_s=settings.timeout_s, environment=environment, log=log,
        memory_limit_gib=settings.memory_limit_gib, devices=devices, stop=stop,
    )  # fmt: skip
    named = " (timeout_s)" if outcome.status == "timeout" else ""
    return replace(outcome, reason=outcome.reason + named, chosen=chosen)
