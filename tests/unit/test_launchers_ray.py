"""Runs as tasks of a Ray cluster that is started on this machine: what becomes of each, ended by itself or from outside."""

import os
import signal
import threading
import time
from functools import partial

import pytest

from tests.launcher import ROOT
from torchtitan.experiments.launchers.job import Job, LauncherError
from torchtitan.experiments.launchers.on_ray import RayLauncher
from torchtitan.experiments.outcome import Outcome
from torchtitan.experiments.process import Stopped

ray = pytest.importorskip("ray")


@pytest.fixture(scope="module")
def launcher(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}.items():
            patch.setenv(name, value)
        patch.delenv("RAY_ADDRESS", raising=False)
        patch.chdir(ROOT)
        by_signal = signal.getsignal(signal.SIGTERM)
        yield RayLauncher(tmp_path_factory.mktemp("ray"), 1, {})
        assert signal.getsignal(signal.SIGTERM) is by_signal
        ray.shutdown()


def job_of(function, *arguments, processes=1, nodes=1, gpus=0, grace_s=0.0):
    return Job(function.__name__, function, arguments, processes, nodes, gpus, 600.0, grace_s)


def ran(word, *, devices, stop, node, poll):
    return Outcome("ok", f"{word} {os.getcwd()}", 1.0, 0, {"pid": os.getpid()})


def failed(*, devices, stop, node, poll):
    raise KeyError("no such cell")


def lost(*, devices, stop, node, poll):
    os.kill(os.getpid(), signal.SIGKILL)


def saves_when_interrupted(folder, *, devices, stop, node, poll):
    (folder / "pid").write_text(str(os.getpid()))
    try:
        while True:
            time.sleep(0.1)  # as the functions of jobs do: Ray's interrupt does not wake a process from a long sleep
    except KeyboardInterrupt:
        (folder / "saved").touch()
        raise


def test_a_task_runs_in_another_process_and_its_outcome_comes_back(launcher):
    polls = []
    outcome = launcher.run(job_of(ran, "word"), threading.Event(), partial(polls.append, None))
    assert (outcome.status, outcome.reason) == ("ok", f"word {os.getcwd()}") and outcome.evidence["pid"] != os.getpid()
    assert polls


def test_a_task_that_raises_has_failed_with_the_last_line_of_its_traceback(launcher):
    outcome = launcher.run(job_of(failed), threading.Event())
    assert (outcome.status, outcome.reason) == ("failed", "the Ray task failed: KeyError: 'no such cell'")


def test_a_task_whose_worker_is_killed_counts_as_killed_and_is_not_retried_by_ray(launcher):
    outcome = launcher.run(job_of(lost), threading.Event())
    assert (outcome.status, outcome.evidence) == ("killed", {"ray_error": "WorkerCrashedError"}) and "\n" not in outcome.reason


@pytest.mark.parametrize("grace_s", [0.0, 60.0])
def test_a_stopped_task_ends_and_saves_if_it_has_time_for_that(launcher, tmp_path, grace_s):
    stop = threading.Event()

    def stop_once_begun():
        if (tmp_path / "pid").exists():
            stop.set()

    with pytest.raises(Stopped):
        launcher.run(job_of(saves_when_interrupted, tmp_path, grace_s=grace_s), stop, stop_once_begun)
    assert (tmp_path / "saved").exists() == bool(grace_s)
    deadline = time.monotonic() + 60
    while ray.available_resources().get("CPU", 0) < ray.cluster_resources()["CPU"]:  # what it held is given back
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_what_the_cluster_has_not_is_refused(launcher):
    cpus = int(ray.cluster_resources()["CPU"])
    launcher.check([job_of(ran, processes=cpus)])
    with pytest.raises(LauncherError, match=f"^ran: a run needs {cpus + 1} CPUs, and Ray's cluster has {cpus} "):
        launcher.check([job_of(ran, processes=cpus + 1)])
    with pytest.raises(LauncherError, match=r"^ran: a run needs 1000 GPUs"):
        launcher.check([job_of(ran, gpus=1000)])
    with pytest.raises(LauncherError, match=r"^ran: nodes = 2 needs --launcher slurm"):
        launcher.check([job_of(ran, nodes=2)])
