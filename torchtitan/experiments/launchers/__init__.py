"""Launchers of runs: on this machine, as Slurm jobs, as Ray tasks."""

from collections.abc import Callable
from pathlib import Path

from torchtitan.experiments.launchers.job import Launcher
from torchtitan.experiments.launchers.local import LocalLauncher
from torchtitan.experiments.launchers.on_ray import RayLauncher
from torchtitan.experiments.launchers.on_slurm import SlurmLauncher

# Name -> launcher, from the folder for its own files, the number of concurrent jobs, and options of sbatch.
Factory = Callable[[Path, int, dict[str, str]], Launcher]
LAUNCHERS: dict[str, Factory] = {"local": LocalLauncher, "slurm": SlurmLauncher, "ray": RayLauncher}
# Concurrent jobs where the number is not given.
JOBS = {"local": 1, "slurm": 32, "ray": 32}
