"""Launcher of Ray tasks, in the cluster that RAY_ADDRESS names or in one that is started on this machine."""

import os
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchtitan.errors import shortened
from torchtitan.experiments.launchers.job import Job, LauncherError, importable_environment
from torchtitan.experiments.outcome import Outcome
from torchtitan.experiments.process import Stopped
from torchtitan.extras import install

_POLL_SECONDS = 0.5


class RayLauncher:
    """Runs jobs as tasks that hold one CPU for each process, and the GPUs asked for."""

    def __init__(self, folder: Path, jobs: int, options: dict[str, str]) -> None:
        try:
            import ray
        except ImportError:
            raise LauncherError(f"--launcher ray: needs the package ray ({install('ray')})") from None
        self._ray = ray
        if not ray.is_initialized():
            os.environ.setdefault("RAY_worker_niceness", "0")  # runs are measured
            environment = {"env_vars": importable_environment()}
            by_signal = signal.getsignal(signal.SIGTERM)  # ray.init sets its own answer, which ends the process
            ray.init(include_dashboard=False, log_to_driver=False, logging_level="ERROR", runtime_env=environment)
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, by_signal)

    def check(self, jobs: Sequence[Job]) -> None:
        there = self._ray.cluster_resources()
        for job in jobs:
            for kind, needed in (("CPU", job.processes), ("GPU", job.gpus)):
                if needed > there.get(kind, 0):
                    text = f"a run needs {needed} {kind}s, and Ray's cluster has {there.get(kind, 0):g}"
                    raise LauncherError(f"{job.name}: {text} (add machines to the cluster, or lower processes)")

    def run(self, job: Job, stop: threading.Event) -> Outcome:
        begun, ray = time.perf_counter(), self._ray
        task = ray.remote(num_cpus=job.processes, num_gpus=job.gpus, max_retries=0)(run_in_task)
        reference = task.options(name=job.name).remote(job, str(Path.cwd()))
        try:
            while not ray.wait([reference], timeout=_POLL_SECONDS)[0]:
                if stop.is_set():
                    raise Stopped
        except (KeyboardInterrupt, Stopped):
            ray.cancel(reference, force=True)
            raise
        try:
            return ray.get(reference)
        except ray.exceptions.RayError as error:
            return _lost(ray, error, time.perf_counter() - begun)


def run_in_task(job: Job, folder: str) -> Outcome:
    """Run a job's function within a Ray task."""
    os.chdir(folder)
    return job.run(devices=None, stop=None)


def _lost(ray: Any, error: Exception, seconds: float) -> Outcome:
    lines = str(error).strip().splitlines() or [""]
    first = shortened(lines[0])
    if isinstance(error, ray.exceptions.RayTaskError):  # an exception in the task, with its traceback
        return Outcome("failed", f"the Ray task failed: {shortened(lines[-1])}", seconds)
    if isinstance(error, ray.exceptions.OutOfMemoryError):
        return Outcome("oom", f"Ray ended the task: {first}", seconds)
    return Outcome("killed", f"the Ray task left no result: {type(error).__name__}: {first}", seconds)
