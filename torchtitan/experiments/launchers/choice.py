"""Choice of a launcher on a command line: one group of options for all commands that start jobs."""

import argparse
import os
from dataclasses import dataclass, field
from pathlib import Path

from torchtitan.experiments.launchers import JOBS, LAUNCHERS
from torchtitan.experiments.launchers.job import Launcher, LauncherError
from torchtitan.pictures.number_text import counted
from torchtitan.processes.command_line import OneLineParser

# Time that a job asks a scheduler for where nothing else bounds it; its work resumes after that.
DAY_SECONDS = 86_400.0


@dataclass(frozen=True)
class Launching:
    """Choice of a launcher.

    Attributes:
        launcher: key of LAUNCHERS.
        jobs: concurrent ones; None: those of JOBS.
        options: of sbatch.
        gpus: whether each process needs a CUDA device.
        nodes: machines that a job's processes are spread over.
    """

    launcher: str = "local"
    jobs: int | None = None
    options: dict[str, str] = field(default_factory=dict)
    gpus: bool = False
    nodes: int = 1

    @property
    def elsewhere(self) -> bool:
        """True if jobs run on other machines, whose packages and devices are not known here."""
        return self.launcher != "local"

    @property
    def concurrent(self) -> int:
        """Number of concurrent jobs."""
        return self.jobs or JOBS[self.launcher]

    def open(self, folder: Path) -> Launcher:
        """Open the launcher; `folder` is for its own files. Raises LauncherError."""
        return LAUNCHERS[self.launcher](folder, self.concurrent, self.options)

    def threads_of(self, processes: int) -> dict[str, str]:
        """Variables that set the threads of each process where jobs share this machine, unless the user has set them."""
        if "OMP_NUM_THREADS" in os.environ or self.elsewhere:
            return {}
        return {"OMP_NUM_THREADS": str(max((os.cpu_count() or 1) // (processes * self.concurrent), 1))}

    def devices_of(self, processes: int) -> int:
        """CUDA devices that each node of a job must have."""
        return processes // self.nodes if self.gpus else 0


HERE = Launching()


def add_launcher_options(
    parser: argparse.ArgumentParser, *, jobs: str = "", gpus: bool = True, machines: bool = False
) -> None:
    """Add the options of a launcher.

    Args:
        parser: of a command.
        jobs: help of --jobs; empty where the command is one job.
        gpus: add --gpus; without it, the command knows by other means what a job needs.
        machines: add --machines.
    """
    add = parser.add_argument_group("launcher").add_argument
    add("--launcher", choices=LAUNCHERS, default="local", help="start the jobs on this machine, as Slurm jobs (submitit) or "
        "as Ray tasks (default: local)")
    add("--slurm", type=sbatch_option, action="append", default=[], metavar="OPTION=VALUE",
        help="of sbatch, as partition=gpu; may be given several times")
    if jobs:
        add("--jobs", type=positive, metavar="N", help=jobs)
    if gpus:
        add("--gpus", action="store_true", help="a job needs a CUDA device for each of its processes: a scheduler is asked for "
            "them, and without them nothing is started")
    if machines:
        add("--machines", type=positive, default=1, metavar="N", help="machines that the processes of a run are on, with "
            "--launcher slurm (default: 1)")


def launching_of(arguments: argparse.Namespace) -> Launching:
    """Choice of a launcher in parsed options; what a command has no option for is the default."""
    given = vars(arguments)
    return Launching(
        given.get("launcher", "local"), given.get("jobs"), dict(given.get("slurm", ())), given.get("gpus", False),
        given.get("machines", 1),
    )  # fmt: skip


def without_launcher_options(words: list[str]) -> list[str]:
    """Words of a command line for the machine of a job: without the options of a launcher, which is the local one there."""
    parser = OneLineParser(add_help=False, allow_abbrev=False)
    add_launcher_options(parser, jobs="N", machines=True)
    return [*parser.parse_known_args(words)[1], "--launcher", "local"]


def check_spread(processes: int, launching: Launching) -> None:
    """Check that the processes of a job can be spread over its nodes. Raises LauncherError."""
    if processes % launching.nodes:
        text = f"{counted(processes, 'process', 'es')} cannot be spread over {launching.nodes} machines"
        raise LauncherError(f"--machines: {text} (change --machines or --processes)")


def positive(text: str) -> int:
    """Type of options: whole numbers from 1 on."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, is {value}")
    return value


def sbatch_option(text: str) -> tuple[str, str]:
    """Type of options: OPTION=VALUE."""
    return pair(text, "OPTION=VALUE")


def pair(text: str, form: str) -> tuple[str, str]:
    """Name and value of a word that has the form NAME=VALUE."""
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise argparse.ArgumentTypeError(f"must be {form}, is {text!r}")
    return name, value
