"""Runs through schedulers: what is refused, what a lost job is called, and submitit's executor without Slurm."""

import os
import signal
import sys
import threading
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest

from tests.launcher import ROOT
from torchtitan.experiments.launchers.choice import LAUNCHERS
from torchtitan.experiments.launchers.job import Job, LauncherError, importable_environment
from torchtitan.experiments.launchers.on_slurm import SlurmLauncher, _lost, run_in_job, sbatch_command
from torchtitan.experiments.outcome import Outcome
from torchtitan.experiments.process import Stopped


def job_of(name, function, *arguments):
    return Job(name, partial(function, *arguments), processes=1, gpus=0, limit_s=600.0)


def ran(word, *, devices, stop):
    return Outcome("ok", f"{word} {os.getcwd()}", 1.0, {"pid": os.getpid()})


@pytest.mark.parametrize(("launcher", "package"), [("slurm", "submitit"), ("ray", "ray")])
def test_a_launcher_without_its_package_says_how_to_install_it(tmp_path, monkeypatch, launcher, package):
    monkeypatch.setitem(__import__("sys").modules, package, None)
    with pytest.raises(LauncherError, match=f"--launcher {launcher}: needs the package {package} .*-m pip install") as caught:
        LAUNCHERS[launcher](tmp_path, 1, {})
    assert "\n" not in str(caught.value)


def test_a_lost_job_is_out_of_memory_only_if_slurm_says_so():
    for state, status in (("OUT_OF_MEMORY", "oom"), ("PREEMPTED", "killed"), ("NODE_FAIL", "killed")):
        outcome = _lost(state, "17_3", RuntimeError("no result\nat all"), False, 5.0)
        assert outcome.status == status and state in outcome.reason and "\n" not in outcome.reason
    error = RuntimeError("Traceback\n  in run_cell\nKeyError: 'a'")
    failed = _lost("FAILED", "17_4", error, True, 5.0)
    assert (failed.status, failed.reason) == ("failed", "Slurm job 17_4: KeyError: 'a'")


def test_jobs_of_submitit_run_elsewhere(tmp_path, monkeypatch):
    pytest.importorskip("submitit")
    monkeypatch.setenv("PYTHONPATH", importable_environment()["PYTHONPATH"])
    monkeypatch.chdir(ROOT)
    launcher = SlurmLauncher(tmp_path, 2, {}, cluster="local")
    outcome = launcher.run(job_of("a", ran, "word"), threading.Event())
    assert outcome.status == "ok" and outcome.reason == f"word {ROOT}" and outcome.chosen["pid"] != os.getpid()
    stop = threading.Event()
    stop.set()
    with pytest.raises(Stopped):
        launcher.run(job_of("c", ran, "word"), stop)


def until_told(*, devices, stop):
    """A job's function that is preempted in its midst."""
    os.kill(os.getpid(), signal.SIGTERM)
    assert stop.wait(10)
    raise Stopped


def test_a_job_that_slurm_takes_the_machine_of_is_stopped_in_time_to_save_and_counts_as_killed(tmp_path, monkeypatch):
    here = SimpleNamespace(job_id="17_3")
    monkeypatch.setitem(sys.modules, "submitit", SimpleNamespace(JobEnvironment=lambda: here))
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR2)}
    monkeypatch.chdir(tmp_path)
    try:
        outcome = run_in_job(job_of("a", until_told), str(tmp_path))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert outcome.status == "killed" and "Slurm job 17_3 was ended by Slurm" in outcome.reason


@pytest.fixture
def small_slurm(tmp_path, monkeypatch):
    """A Slurm of small scripts: sbatch submits job 17, sacct says what the file `state` does, scancel is noted."""
    pytest.importorskip("submitit").SlurmJob.watcher.clear()
    sacct = f'echo "JobID|State"; echo "17|$(cat {tmp_path}/state)"'
    sbatch = f'cp "$1" {tmp_path}/script; echo "Submitted batch job 17"'
    scancel = f'echo "$1" >> {tmp_path}/cancelled; echo CANCELLED > {tmp_path}/state'
    for name, text in {"sbatch": sbatch, "srun": "", "sacct": sacct, "scancel": scancel}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", "")
    return tmp_path


def test_a_start_after_a_kill_waits_for_the_job_that_was_submitted_before(small_slurm):
    job = job_of("a", ran, "word")
    SlurmLauncher(small_slurm / "out", 1, {})._submit(job)
    assert "#SBATCH --no-requeue" in (small_slurm / "script").read_text().splitlines()

    def found(job, state):
        (small_slurm / "state").write_text(state)
        SlurmJob.watcher.clear()  # as in a process that has just started
        there = SlurmLauncher(small_slurm / "out", 1, {})._of_earlier_start(job)
        return there and there.job_id

    from submitit import SlurmJob

    assert found(job, "RUNNING") == found(job, "COMPLETED") == "17" and found(job_of("b", ran, "word"), "RUNNING") is None
    assert found(job, "") is None  # Slurm does not know it any more
    assert not (small_slurm / "cancelled").exists()


def test_a_preempted_job_that_left_no_result_is_killed(small_slurm):
    (small_slurm / "state").write_text("PREEMPTED")
    outcome = SlurmLauncher(small_slurm / "out", 1, {}).run(job_of("a", ran, "word"), threading.Event())
    assert outcome.status == "killed" and "PREEMPTED" in outcome.reason
    assert not list((small_slurm / "out" / "slurm" / "submitted").iterdir())


def test_jobs_are_named_by_sweep_and_cell_and_ask_for_a_cpu_of_each_process(small_slurm):
    launcher = SlurmLauncher(small_slurm / "out", 2, {"time": "1:00:00"})
    job = Job("a" * 300, partial(ran, "word"), 2, 0, 2400.0)
    launcher._submit(job)
    lines = (small_slurm / "script").read_text().splitlines()
    assert f"#SBATCH --job-name=out-{'a' * 196}" in lines and "#SBATCH --cpus-per-task=2" in lines
    command = sbatch_command(replace(job, name="CELL"), small_slurm / "out", {"time": "1:00:00"})
    assert command == "sbatch --job-name=out-CELL --time=1:00:00 --nodes=1 --ntasks-per-node=1 --cpus-per-task=2 --no-requeue"
    assert "#SBATCH --time=1:00:00" in lines


def test_a_job_asks_for_its_machines_with_the_options_of_the_user(small_slurm):
    launcher = SlurmLauncher(small_slurm / "out", 2, {"partition": "gpu", "cpus-per-task": "64"})
    assert launcher._submit(Job("a", partial(ran, "word"), 16, 8, 2400.0)).job_id == "17"
    lines = {line.removeprefix("#SBATCH --") for line in (small_slurm / "script").read_text().splitlines()}
    assert {"nodes=1", "ntasks-per-node=1", "gpus-per-node=8", "cpus-per-task=64", "partition=gpu", "time=40"} <= lines
