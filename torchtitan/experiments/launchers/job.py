"""Job of a launcher: one run, with what it needs of machines."""

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torchtitan.experiments.folder import ExperimentError
from torchtitan.experiments.outcome import Outcome

_ROOT = Path(__file__).resolve().parents[3]


class LauncherError(ExperimentError):
    """Jobs that a launcher cannot run as requested; the message is one line."""


@dataclass(frozen=True)
class Job:
    """Job: a function that is called on a machine.

    Attributes:
        run: function that another process can unpickle; called with `devices` (numbers of the CUDA devices to use, None for
            all) and `stop` (ends the run: it raises Stopped).
        limit_s: seconds after which the machine is given back.
    """

    name: str
    run: Callable[..., Outcome]
    processes: int
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


def importable_environment() -> dict[str, str]:
    """Environment in which other processes find this program, which need not be installed."""
    paths = [str(_ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {"PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}
