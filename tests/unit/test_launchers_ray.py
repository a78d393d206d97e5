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


def job_of(function, *arguments, processes=1, gpus=0):
    return Job(function.__name__, partial(function, *arguments), processes, gpus, 600.0)


def ran(word, *, devices, stop):
    return Outcome("ok", f"{word} {os.getcwd()}", 1.0, {"pid": os.getpid()})


def failed(*, devices, stop):
    raise KeyError("no such cell")


def lost(*, devices, stop):
    os.kill(os.getpid(), signal.SIGKILL)


def endless(folder, *, devices, stop):
    (folder / "pid").write_text(str(os.getpid()))
    while True:
        time.sleep(0.1)


def test_a_task_runs_in_another_process_and_its_outcome_comes_back(launcher):
    outcome = launcher.run(job_of(ran, "word"), threading.Event())
    assert (outcome.status, outcome.reason) == ("ok", f"word {os.getcwd()}") and outcome.chosen["pid"] != os.getpid()


def test_a_task_that_raises_has_failed_with_the_last_line_of_its_traceback(launcher):
    outcome = launcher.run(job_of(failed), threading.Event())
    assert (outcome.status, outcome.reason) == ("failed", "the Ray task failed: KeyError: 'no such cell'")


def test_a_task_whose_worker_is_killed_counts_as_killed_and_is_not_retried_by_ray(launcher):
    outcome = launcher.run(job_of(lost), threading.Event())
    assert outcome.status == "killed" and "WorkerCrashedError" in outcome.reason and "\n" not in outcome.reason


def test_a_stopped_task_ends(launcher, tmp_path):
    stop = threading.Event()

    def stop_once_begun():
        while not (tmp_path / "pid").exists():
            time.sleep(0.1)
        stop.set()

    threading.Thread(target=stop_once_begun, daemon=True).start()
    with pytest.raises(Stopped):
        launcher.run(job_of(endless, tmp_path), stop)
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
