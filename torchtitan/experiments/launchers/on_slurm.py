"""Launcher of Slurm jobs, by submitit: jobs that wait at the same time become one job array."""

import itertools
import math
import os
import shutil
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from torchtitan.experiments.grid import SweepError
from torchtitan.experiments.launchers.job import Job, importable_environment, join_outcomes
from torchtitan.experiments.outcome import Outcome
from torchtitan.experiments.process import Node, Stopped
from torchtitan.extras import install

_GATHER_SECONDS = 1.0  # in which jobs are gathered into an array
_POLL_SECONDS = 1.0
_PORT = 29_000


class SlurmLauncher:
    """Runs jobs through sbatch; the folder is on a disk that all machines see."""

    def __init__(self, folder: Path, jobs: int, options: dict[str, str], cluster: str = "slurm") -> None:
        """cluster: "slurm", or "local" for submitit's executor without Slurm, where nodes are processes."""
        try:
            import submitit
        except ImportError:
            raise SweepError(f"--launcher slurm: needs the package submitit ({install('slurm')})") from None
        if cluster == "slurm" and shutil.which("sbatch") is None:
            raise SweepError("--launcher slurm: there is no sbatch (start the sweep on a machine that submits Slurm jobs)")
        os.environ.update(importable_environment())  # jobs inherit it
        self._executor = submitit.AutoExecutor(folder.resolve() / "slurm", cluster=cluster)
        self._cluster, self._jobs, self._options = cluster, jobs, options
        self._turn = threading.Lock()
        self._waiting: list[tuple[Job, Future]] = []

    def check(self, jobs: Sequence[Job]) -> None:
        """Accept all: what the cluster has not is refused by sbatch."""

    def run(self, job: Job, stop: threading.Event) -> Outcome:
        begun = time.perf_counter()
        submitted = self._submit(job)
        while not submitted.done():
            if stop.wait(_POLL_SECONDS):
                submitted.cancel()
                raise Stopped
        from submitit.core.utils import FailedJobError, UncompletedJobError

        try:
            outcomes = submitted.results()
        except (UncompletedJobError, OSError) as error:
            raised = isinstance(error, FailedJobError)
            return _lost(str(submitted.state), str(submitted.job_id), error, raised, time.perf_counter() - begun)
        return join_outcomes(outcomes)

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
                    problem = SweepError(f"--launcher slurm: sbatch refuses {jobs[0].name}: {error}")
                for future in futures:
                    future.set_exception(problem)
                continue
            for future, submitted in zip(futures, found, strict=True):
                future.set_result(submitted)

    def _parameters(self, job: Job, count: int) -> dict[str, Any]:
        local, processes = self._cluster == "local", job.processes // job.nodes
        parameters: dict[str, Any] = {
            "name": "sweep", "timeout_min": math.ceil(job.limit_s / 60), "nodes": 1 if local else job.nodes,
            "tasks_per_node": job.nodes if local else 1, "cpus_per_task": processes,
        } | ({"gpus_per_node": job.gpus} if job.gpus else {})  # fmt: skip
        if local:
            return parameters
        options = {name.replace("-", "_"): value for name, value in self._options.items()}  # as submitit's own are written
        return parameters | {
            "slurm_array_parallelism": min(count, self._jobs), "slurm_additional_parameters": options,
        }


def run_in_job(job: Job, folder: str) -> Outcome:
    """Run a job's function on one of its nodes, within a Slurm job."""
    import submitit

    os.chdir(folder)
    here = submitit.JobEnvironment()
    node = None
    if job.nodes > 1:
        name = "".join(filter(str.isalnum, here.job_id))
        port = _PORT + int("".join(filter(str.isdigit, name)) or 0) % 1000
        node = Node(here.global_rank, job.nodes, f"{here.hostnames[0]}:{port}", name)
    return job.function(*job.arguments, devices=None, stop=None, node=node)


def _lost(state: str, job_id: str, error: Exception, raised: bool, seconds: float) -> Outcome:
    """Outcome of a job that left no result; raised: its function raised the error."""
    evidence = {"slurm_job": job_id, "slurm_state": state}
    if state == "OUT_OF_MEMORY":
        return Outcome("oom", f"Slurm job {job_id}: OUT_OF_MEMORY", seconds, 1, evidence | {"proof": "Slurm's job state"})
    lines = str(error).strip().splitlines() or [""]
    if raised:
        return Outcome("failed", f"Slurm job {job_id}: {lines[-1][:250]}", seconds, 1, evidence)
    return Outcome("killed", f"Slurm job {job_id} left no result, its state is {state}: {lines[0][:200]}", seconds, 1, evidence)
