"""Choice of a launcher: where the runs of a grid are started, and how many at a time."""

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from torchtitan.experiments.launchers.job import Launcher, LauncherError
from torchtitan.experiments.launchers.local import LocalLauncher
from torchtitan.experiments.launchers.on_ray import RayLauncher
from torchtitan.experiments.launchers.on_slurm import SlurmLauncher
from torchtitan.processes.command_line import assignment, at_least

# Name -> launcher, from the folder for its own files, the number of concurrent jobs, and options of sbatch.
LAUNCHERS: dict[str, Callable[[Path, int, dict[str, str]], Launcher]] = {
    "local": LocalLauncher, "slurm": SlurmLauncher, "ray": RayLauncher,
}  # fmt: skip
JOBS = {"local": 1, "slurm": 32, "ray": 32}  # concurrent ones where the number is not given


@dataclass(frozen=True)
class Launching:
    """Choice of a launcher; jobs: concurrent ones; None: those of JOBS. Raises LauncherError: options of another launcher."""

    launcher: str = "local"
    jobs: int | None = None
    options: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.options and self.launcher != "slurm":
            raise LauncherError("--slurm: is an option of --launcher slurm (add it, or remove --slurm)")
        for name in {"nodes", "ntasks", "ntasks-per-node"} & self.options.keys():
            raise LauncherError(f"--slurm {name}: a run takes one machine and starts its processes there itself (leave it out)")

    @property
    def elsewhere(self) -> bool:
        """True if jobs run on other machines, whose packages and devices are not known here."""
        return self.launcher != "local"

    @property
    def concurrent(self) -> int:
        return self.jobs or JOBS[self.launcher]

    def open(self, folder: Path) -> Launcher:
        """Open the launcher; `folder` is for its own files. Raises LauncherError."""
        return LAUNCHERS[self.launcher](folder, self.concurrent, self.options)

    def threads_of(self, processes: int) -> dict[str, str]:
        """Variables that set the threads of each process where jobs share this machine, unless the user has set them."""
        if "OMP_NUM_THREADS" in os.environ or self.elsewhere:
            return {}
        return {"OMP_NUM_THREADS": str(max((os.cpu_count() or 1) // (processes * self.concurrent), 1))}


def add_launcher_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a launcher to those of a command."""
    add = parser.add_argument_group("launcher").add_argument
    defaults = ", ".join(f"{name} {jobs}" for name, jobs in JOBS.items())
    add("--launcher", choices=LAUNCHERS, default="local", help="start the runs on this machine, as Slurm jobs (submitit) or "
        "as Ray tasks (default: local)")
    add("--slurm", type=assignment, action="append", default=[], metavar="OPTION=VALUE",
        help="option of sbatch, as partition=gpu; may be given several times")
    add("--jobs", type=at_least(1), metavar="N",
        help=f"concurrent runs; on this machine with CUDA each has separate devices (default: {defaults})")
