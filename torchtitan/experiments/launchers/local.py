"""Launcher on this machine: a job at a time, or several on separate CUDA devices."""

import threading
from collections.abc import Sequence
from pathlib import Path

import torch

from torchtitan.experiments.launchers.job import Job, LauncherError
from torchtitan.experiments.outcome import Outcome
from torchtitan.experiments.process import Stopped
from torchtitan.pictures.number_text import counted


class LocalLauncher:
    """Runs jobs on this machine, in the calling thread."""

    def __init__(self, folder: Path, jobs: int, options: dict[str, str]) -> None:
        self._jobs = jobs
        self._turn = threading.Condition()
        self._devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else None

    def check(self, jobs: Sequence[Job]) -> None:
        there, most = len(self._devices or []), max((job.processes for job in jobs), default=1)
        if (needed := max((job.gpus for job in jobs), default=0)) > there:
            raise LauncherError(
                f"needs.gpus: a run needs {needed} CUDA devices, and this machine has {there} (run it on a machine that"
                " has them, or through --launcher slurm or ray)"
            )
        if self._devices is not None and most * self._jobs > there:
            advice = f"lower --jobs to {there // most}" if there >= most else "lower processes"
            advice += ", or CUDA_VISIBLE_DEVICES= for the CPU"
            needed_processes = f"{counted(most, 'process', 'es')} x {counted(self._jobs, 'job')}"
            raise LauncherError(f"{needed_processes} need more than the {there} CUDA devices ({advice})")

    def run(self, job: Job, stop: threading.Event) -> Outcome:
        devices = self._acquire(job.processes, stop)
        try:
            return job.run(devices=devices, stop=stop)
        finally:
            self._release(devices)

    def _acquire(self, count: int, stop: threading.Event) -> list[int] | None:
        if self._devices is None:
            return None
        with self._turn:
            while len(self._devices) < count:
                self._turn.wait(0.2)
                if stop.is_set():
                    raise Stopped
            taken, self._devices[:] = self._devices[:count], self._devices[count:]
        return taken

    def _release(self, devices: list[int] | None) -> None:
        if devices is not None and self._devices is not None:
            with self._turn:
                self._devices += devices
                self._turn.notify_all()
