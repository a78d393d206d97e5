"""Job of a launcher: one run, with what it needs of machines."""

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torchtitan.experiments.folder import ExperimentError
from torchtitan.experiments.outcome import Outcome

_ROOT = Path(__file__).resolve().parents[3]
# Of several nodes' outcomes, the first of these statuses that one has is that of the run.
_PRECEDENCE = ("oom", "refused", "killed", "timeout", "failed", "ok")


class LauncherError(ExperimentError):
    """Jobs that a launcher cannot run as requested; the message is one line."""


@dataclass(frozen=True)
class Job:
    """Job: a function that is called on one or more machines.

    Attributes:
        name: of the run, a file name.
        function: of a module, so that another process can import it; called with the arguments and with `devices`
            (numbers of the CUDA devices to use, None for all), `stop` (ends the run: it raises Stopped) and `node` (None
            for a run on one machine).
        arguments: of the function.
        processes: of the run, on all its nodes.
        nodes: machines of the run.
        gpus: CUDA devices of each node to ask for.
        limit_s: seconds after which the machines are given back.
    """

    name: str
    function: Callable[..., Outcome]
    arguments: tuple[Any, ...]
    processes: int
    nodes: int
    gpus: int
    limit_s: float


class Launcher(Protocol):
    """Launcher: runs jobs, several at the same time if it is called from several threads."""

    def check(self, jobs: Sequence[Job]) -> None:
        """Check that the jobs can be run. Raises LauncherError."""

    def run(self, job: Job, stop: threading.Event) -> Outcome:
        """Run a job to its end; `killed` if its machine was taken away.

        Raises:
            Stopped: `stop` was set, by another thread.
            LauncherError: a scheduler refuses the job.
            KeyboardInterrupt: after the job was ended.
        """


def join_outcomes(outcomes: Sequence[Outcome]) -> Outcome:
    """Join the outcomes of a run's nodes: the cause before its consequences on other nodes."""
    return min(outcomes, key=lambda outcome: _PRECEDENCE.index(outcome.status))


def importable_environment() -> dict[str, str]:
    """Environment in which other processes find this program, which need not be installed."""
    paths = [str(_ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {"PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}
