"""Launcher of Slurm jobs, by submitit: jobs that wait at the same time become one job array.

Jobs outlive the process that has submitted them, if that is killed: each is noted, and the next start waits for it.
"""

import hashlib
import itertools
import json
import math
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

from tqdm import tqdm

from torchtitan.experiments.launchers.job import Job, LauncherError, importable_environment, join_outcomes, nothing
from torchtitan.experiments.outcome import Outcome
from torchtitan.experiments.process import Node, Stopped
from torchtitan.extras import install
from torchtitan.files.durable import make_folder, replace_file

_GATHER_SECONDS = 1.0  # in which jobs are gathered into an array
_POLL_SECONDS = 1.0
_PORT = 29_000
_ENDING_SECONDS = 60.0  # for a job that is cancelled so that another can begin


class SlurmLauncher:
    """Runs jobs through sbatch; the folder is on a disk that all machines see."""

    def __init__(self, folder: Path, jobs: int, options: dict[str, str], cluster: str = "slurm") -> None:
        """cluster: "slurm", or "local" for submitit's executor without Slurm, where nodes are processes."""
        try:
            import submitit
        except ImportError:
            raise LauncherError(f"--launcher slurm: needs the package submitit ({install('slurm')})") from None
        if cluster == "slurm" and shutil.which("sbatch") is None:
            raise LauncherError("--launcher slurm: there is no sbatch (start the command on a machine that submits Slurm jobs)")
        os.environ.update(importable_environment())  # jobs inherit it
        self._executor = submitit.AutoExecutor(folder.resolve() / "slurm", cluster=cluster)
        self._submitted = folder.resolve() / "slurm" / "submitted"
        self._cluster, self._jobs, self._options = cluster, jobs, options
        self._turn = threading.Lock()
        self._waiting: list[tuple[Job, Future]] = []

    def check(self, jobs: Sequence[Job]) -> None:
        """Accept all: what the cluster has not is refused by sbatch."""

    def run(self, job: Job, stop: threading.Event, poll: Callable[[], None] = nothing) -> Outcome:
        begun = time.perf_counter()
        submitted = self._of_earlier_start(job) or self._submit(job)
        try:
            while not _has_ended(submitted):
                poll()
                if stop.wait(_POLL_SECONDS):
                    raise Stopped
        except (KeyboardInterrupt, Stopped):
            _cancel(submitted, job.grace_s)
            self._note(job).unlink(missing_ok=True)
            raise
        poll()
        self._note(job).unlink(missing_ok=True)
        return _outcome_of(submitted, time.perf_counter() - begun)

    def _of_earlier_start(self, job: Job) -> Any:
        """Job that an earlier start has submitted for the same work, and did not live to see the end of; else None.

        One for other work under the same name is ended.
        """
        try:
            note = json.loads(self._note(job).read_text())
            job_id, work = str(note["job"]), note["work"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        from submitit import SlurmJob

        found: Any = SlurmJob(folder=self._executor.folder, job_id=job_id, tasks=list(range(job.nodes)))
        there = found.done(force_check=True) or found.state != "UNKNOWN"
        if there and work == _work_of(job):
            tqdm.write(f"{job.name}: waiting for Slurm job {job_id} of an earlier start", file=sys.stderr)
            return found
        if there and not _has_ended(found):
            _cancel(found, max(job.grace_s, _ENDING_SECONDS))
        return None

    def _note(self, job: Job) -> Path:
        return self._submitted / f"{hashlib.sha256(job.name.encode()).hexdigest()[:16]}.json"

    def _submit(self, job: Job) -> Any:
        """Submit a job, in one array with those that other threads submit now."""
        submitted: Future = Future()
        with self._turn:
            self._waiting.append((job, submitted))
            first = len(self._waiting) == 1
        if first:
            time.sleep(_GATHER_SECONDS)
            with self._turn:
                waiting, self._waiting = self._waiting, []
                self._submit_arrays(waiting)
        return submitted.result()

    def _submit_arrays(self, waiting: list[tuple[Job, Future]]) -> None:
        from submitit.core.utils import FailedJobError, FailedSubmissionError  # sbatch failed; or printed no number

        def resources(entry: tuple[Job, Future]) -> tuple:
            return entry[0].nodes, entry[0].gpus, entry[0].processes, entry[0].limit_s

        for _, group in itertools.groupby(sorted(waiting, key=resources), resources):
            jobs, futures = zip(*group, strict=True)
            try:
                self._executor.update_parameters(**self._parameters(jobs[0], len(jobs)))
                found = self._executor.map_array(run_in_job, jobs, [str(Path.cwd())] * len(jobs))
            except Exception as error:  # noqa: BLE001 - raised again in every thread that waits for one of the jobs
                problem: Exception = error
                if isinstance(error, FailedJobError | FailedSubmissionError | OSError):
                    problem = LauncherError(f"--launcher slurm: sbatch refuses {jobs[0].name}: {error}")
                for future in futures:
                    future.set_exception(problem)
                continue
            for job, future, submitted in zip(jobs, futures, found, strict=True):
                with suppress(OSError):  # without the note a killed start's job is not found again, no more
                    self._write_note(job, submitted)
                future.set_result(submitted)

    def _write_note(self, job: Job, submitted: Any) -> None:
        if self._cluster == "slurm":
            make_folder(self._submitted)
            note = {"name": job.name, "job": submitted.job_id, "work": _work_of(job)}
            replace_file(self._note(job), json.dumps(note) + "\n")

    def _parameters(self, job: Job, count: int) -> dict[str, Any]:
        local, processes = self._cluster == "local", job.processes // job.nodes
        parameters: dict[str, Any] = {
            "name": "torchtitan-dit", "timeout_min": math.ceil(job.limit_s / 60), "nodes": 1 if local else job.nodes,
            "tasks_per_node": job.nodes if local else 1, "cpus_per_task": processes,
        } | ({"gpus_per_node": job.gpus} if job.gpus else {})  # fmt: skip
        if local:
            return parameters
        # A job that is preempted is submitted again from here, and must not be queued again by Slurm too.
        options: dict[str, Any] = {"no_requeue": True}
        options |= {name.replace("-", "_"): value for name, value in self._options.items()}  # as submitit's own are written
        return parameters | {
            "slurm_array_parallelism": min(count, self._jobs), "slurm_additional_parameters": options,
        }


def run_in_job(job: Job, folder: str) -> Outcome:
    """Run a job's function on one of its nodes, within a Slurm job; it is stopped when Slurm is about to take the machine."""
    import submitit

    os.chdir(folder)
    here, begun, stop = submitit.JobEnvironment(), time.perf_counter(), threading.Event()
    node = None
    if job.nodes > 1:
        name = "".join(filter(str.isalnum, here.job_id))
        port = _PORT + int("".join(filter(str.isdigit, name)) or 0) % 1000
        node = Node(here.global_rank, job.nodes, f"{here.hostnames[0]}:{port}", name)
    for number in (signal.SIGTERM, signal.SIGUSR2):  # preemption, and submitit's warning before the end of the time
        signal.signal(number, lambda *_: stop.set())
    try:
        return job.function(*job.arguments, devices=None, stop=stop, node=node, poll=nothing)
    except Stopped:
        reason = f"Slurm job {here.job_id} was ended by Slurm: preempted, cancelled or out of time"
        return Outcome("killed", reason, time.perf_counter() - begun, 1, {"slurm_job": here.job_id})


def _work_of(job: Job) -> str:
    """Digest of what a job does, the same in another process."""
    text = repr((job.function.__qualname__, job.arguments, job.processes, job.nodes))
    return hashlib.sha256(text.encode()).hexdigest()


def _has_ended(submitted: Any) -> bool:
    """Check whether a job has ended; submitit waits for one that was preempted, as if Slurm would queue it again."""
    return submitted.done() or submitted.state == "PREEMPTED"


def _cancel(submitted: Any, grace_s: float) -> None:
    submitted.cancel(check=False)
    deadline = time.monotonic() + grace_s
    while not _has_ended(submitted) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)


def _outcome_of(submitted: Any, seconds: float) -> Outcome:
    from submitit.core.utils import FailedJobError, UncompletedJobError

    if not submitted.done():
        return _lost(submitted.state, str(submitted.job_id), RuntimeError("ended by Slurm"), False, seconds)
    try:
        return join_outcomes(submitted.results())
    except (UncompletedJobError, OSError) as error:
        raised = isinstance(error, FailedJobError)
        return _lost(str(submitted.state), str(submitted.job_id), error, raised, seconds)


def _lost(state: str, job_id: str, error: Exception, raised: bool, seconds: float) -> Outcome:
    """Outcome of a job that left no result; raised: its function raised the error."""
    evidence = {"slurm_job": job_id, "slurm_state": state}
    if state == "OUT_OF_MEMORY":
        return Outcome("oom", f"Slurm job {job_id}: OUT_OF_MEMORY", seconds, 1, evidence | {"proof": "Slurm's job state"})
    lines = str(error).strip().splitlines() or [""]
    if raised:
        return Outcome("failed", f"Slurm job {job_id}: {lines[-1][:250]}", seconds, 1, evidence)
    return Outcome("killed", f"Slurm job {job_id} left no result, its state is {state}: {lines[0][:200]}", seconds, 1, evidence)
