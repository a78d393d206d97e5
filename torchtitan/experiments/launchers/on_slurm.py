"""Launcher of Slurm jobs, by submitit.

Jobs outlive the process that has submitted them, if that is killed: each is noted, and the next start waits for it.
"""

import math
import os
import shlex
import shutil
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tqdm import tqdm

from torchtitan.errors import shortened
from torchtitan.experiments.launchers.job import Job, LauncherError, importable_environment
from torchtitan.experiments.outcome import Outcome
from torchtitan.experiments.process import Stopped
from torchtitan.extras import install
from torchtitan.files.durable import make_folder, replace_file

_POLL_SECONDS = 1.0
_LONGEST_NAME = 200  # of a job; Slurm's records keep 255
_OF_SBATCH = {"name": "job_name", "timeout_min": "time", "tasks_per_node": "ntasks_per_node"}  # submitit's name -> sbatch's
_ADDITIONAL = "slurm_additional_parameters"


class SlurmLauncher:
    """Runs jobs through sbatch; the folder is on a disk that all machines see."""

    def __init__(self, folder: Path, jobs: int, options: dict[str, str], cluster: str = "slurm") -> None:
        """cluster: "slurm", or "local" for submitit's executor without Slurm."""
        try:
            import submitit
        except ImportError:
            raise LauncherError(f"--launcher slurm: needs the package submitit ({install('slurm')})") from None
        if cluster == "slurm" and shutil.which("sbatch") is None:
            raise LauncherError("--launcher slurm: there is no sbatch (start the command on a machine that submits Slurm jobs)")
        os.environ.update(importable_environment())  # jobs inherit it
        self._executor = submitit.AutoExecutor(folder.resolve() / "slurm", cluster=cluster)
        self._submitted = folder.resolve() / "slurm" / "submitted"
        self._cluster, self._options, self._folder = cluster, options, folder
        self._turn = threading.Lock()

    def check(self, jobs: Sequence[Job]) -> None:
        """Accept all: what the cluster has not is refused by sbatch."""

    def run(self, job: Job, stop: threading.Event) -> Outcome:
        begun, note = time.perf_counter(), self._submitted / job.name
        submitted = self._of_earlier_start(job) or self._submit(job)
        try:
            while not _has_ended(submitted):
                if stop.wait(_POLL_SECONDS):
                    raise Stopped
        except (KeyboardInterrupt, Stopped):
            submitted.cancel(check=False)
            note.unlink(missing_ok=True)
            raise
        note.unlink(missing_ok=True)
        return _outcome_of(submitted, time.perf_counter() - begun)

    def _of_earlier_start(self, job: Job) -> Any:
        """Job of the same run that an earlier start has submitted, and did not live to see the end of; else None."""
        try:
            job_id = (self._submitted / job.name).read_text().strip()
        except OSError:
            return None
        from submitit import SlurmJob

        found: Any = SlurmJob(folder=self._executor.folder, job_id=job_id)
        if not found.done(force_check=True) and found.state == "UNKNOWN":  # Slurm does not know it any more
            return None
        tqdm.write(f"{job.name}: waiting for Slurm job {job_id} of an earlier start", file=sys.stderr)
        return found

    def _submit(self, job: Job) -> Any:
        from submitit.core.utils import FailedJobError, FailedSubmissionError  # sbatch failed; or printed no number

        with self._turn:
            try:
                parameters = _parameters(job, self._folder)
                if self._cluster == "slurm":
                    parameters[_ADDITIONAL] = _options(self._options)
                self._executor.update_parameters(**parameters)
                submitted = self._executor.submit(run_in_job, job, str(Path.cwd()))
            except (FailedJobError, FailedSubmissionError, OSError) as error:
                raise LauncherError(f"--launcher slurm: sbatch refuses {job.name}: {error}") from None
        if self._cluster == "slurm":
            with suppress(OSError):  # without the note a killed start's job is not found again, no more
                make_folder(self._submitted)
                replace_file(self._submitted / job.name, f"{submitted.job_id}\n")
        return submitted


def sbatch_command(job: Job, folder: Path, options: dict[str, str]) -> str:
    """Command that submits a job, without the script; needs no Slurm here."""
    found = {_OF_SBATCH.get(name, name): value for name, value in _parameters(job, folder).items()} | _options(options)
    words = [f"--{name.replace('_', '-')}{'' if value is True else f'={value}'}" for name, value in found.items()]
    return shlex.join(["sbatch", *words])


def _parameters(job: Job, folder: Path) -> dict[str, Any]:
    return {
        "name": f"{folder.resolve().name}-{job.name}"[:_LONGEST_NAME], "timeout_min": math.ceil(job.limit_s / 60), "nodes": 1,
        "tasks_per_node": 1, "cpus_per_task": job.processes,
    } | ({"gpus_per_node": job.gpus} if job.gpus else {})  # fmt: skip


def _options(of_user: dict[str, str]) -> dict[str, Any]:
    # A job that is preempted is submitted again from here, and must not be queued again by Slurm too.
    return {"no_requeue": True} | {name.replace("-", "_"): value for name, value in of_user.items()}  # as submitit's own


def run_in_job(job: Job, folder: str) -> Outcome:
    """Run a job's function within a Slurm job; it is stopped when Slurm is about to take the machine."""
    import submitit

    os.chdir(folder)
    here, begun, stop = submitit.JobEnvironment(), time.perf_counter(), threading.Event()
    for number in (signal.SIGTERM, signal.SIGUSR2):  # preemption, and submitit's warning before the end of the time
        signal.signal(number, lambda *_: stop.set())
    try:
        return job.run(devices=None, stop=stop)
    except Stopped:
        reason = f"Slurm job {here.job_id} was ended by Slurm: preempted, cancelled or out of time"
        return Outcome("killed", reason, time.perf_counter() - begun)


def _has_ended(submitted: Any) -> bool:
    """Check whether a job has ended; submitit waits for one that was preempted, as if Slurm would queue it again."""
    return submitted.done() or submitted.state == "PREEMPTED"


def _outcome_of(submitted: Any, seconds: float) -> Outcome:
    from submitit.core.utils import FailedJobError, UncompletedJobError

    state, job_id = str(submitted.state), str(submitted.job_id)
    if not submitted.done():
        return _lost(state, job_id, RuntimeError("ended by Slurm"), False, seconds)
    try:
        return submitted.result()
    except (UncompletedJobError, OSError) as error:
        return _lost(state, job_id, error, isinstance(error, FailedJobError), seconds)


def _lost(state: str, job_id: str, error: Exception, raised: bool, seconds: float) -> Outcome:
    """Outcome of a job that left no result; raised: its function raised the error."""
    if state == "OUT_OF_MEMORY":
        return Outcome("oom", f"Slurm job {job_id}: OUT_OF_MEMORY", seconds)
    lines = str(error).strip().splitlines() or [""]
    if raised:
        return Outcome("failed", f"Slurm job {job_id}: {shortened(lines[-1])}", seconds)
    return Outcome("killed", f"Slurm job {job_id} left no result, its state is {state}: {shortened(lines[0])}", seconds)
