"""Run of a cell on the machine that it was given: the search of its batch size, if requested, and the training."""

import threading
from dataclasses import dataclass, replace
from pathlib import Path

from torchtitan.experiments.autotune.tuned_batch import tuned_batch_size
from torchtitan.experiments.grid import BATCH_KEY, SweepSettings
from torchtitan.experiments.outcome import Outcome
from torchtitan.experiments.process import Node, run_processes


@dataclass(frozen=True)
class CellRun:
    """Run of a cell.

    Attributes:
        arguments: of train.py.
        processes: of the run, on all nodes.
        settings: of the sweep.
        cache: folder of the batch sizes' searches.
        log: file for the output of its processes.
        environment: variables to set besides those of the machine.
    """

    arguments: list[str]
    processes: int
    settings: SweepSettings
    cache: Path
    log: Path
    environment: dict[str, str]


def run_cell(run: CellRun, *, devices: list[int] | None, stop: threading.Event | None, node: Node | None) -> Outcome:
    """Run a cell once; a searched batch size is in the outcome's `chosen`.

    Raises:
        Stopped: `stop` was set.
    """
    settings, arguments, chosen = run.settings, run.arguments, {}
    if settings.autotune:
        found = tuned_batch_size(
            arguments, run.processes, settings, cache=run.cache, devices=devices, stop=stop or threading.Event()
        )
        if isinstance(found, Outcome):
            return found
        chosen = {BATCH_KEY: found}
        arguments = [*arguments, f"--{BATCH_KEY}={found}"]
    outcome = run_processes(
        arguments, processes=run.processes, timeout_s=settings.timeout_s, environment=run.environment, log=run.log,
        memory_limit_gib=settings.memory_limit_gib, devices=devices, retries=0, stop=stop, node=node,
    )  # fmt: skip
    named = " (timeout_s)" if outcome.status == "timeout" else ""
    return replace(outcome, reason=outcome.reason + named, chosen=chosen)
