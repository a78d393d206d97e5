"""Disks that are full, read-only or slow under real runs: training goes on, the checkpoint before stays good."""

import errno
import resource
import signal
import subprocess
import sys
import time

import pytest

from tests.end_to_end.runs import write_config
from tests.faults.forked import FAULT, ForkedRun
from torchtitan.checkpoint.checkpointer import checkpoint_steps, newest_good
from torchtitan.runs.check import check_run

SHORT = ("--sampling.enable", "false", "--checkpoint.interval", "10")
ENDLESS = (*SHORT, "--training.steps", "100000")


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return write_config(tmp_path_factory.mktemp("disks"))


def saved(run: ForkedRun) -> int:
    """Step of the newest checkpoint, good or not yet checked; 0 for none."""
    return max(checkpoint_steps(run.folder / "checkpoint"), default=0)


def check_that_it_goes_on(run: ForkedRun, words: str) -> None:
    """A save fails, for a reason in so many words; the checkpoint before stays good, and the steps go on."""
    before = saved(run)
    run.wait_until(lambda: any(words in line for line in failures(run)))
    assert newest_good(run.folder / "checkpoint") == (before, [])
    step = run.said().rpartition(" step ")[2].split("/")[0]
    run.wait_until(lambda: run.said().rpartition(" step ")[2].split("/")[0] != step)


def failures(run: ForkedRun) -> list[str]:
    return [line for line in run.said().splitlines() if "and the next save tries again where training continues" in line]


def check_that_it_saves_again(run: ForkedRun) -> None:
    before = saved(run)
    run.wait_until(lambda: saved(run) > before)


def end(run: ForkedRun) -> None:
    run.processes[0].send_signal(signal.SIGTERM)
    codes, outputs = run.wait()
    assert codes == [128 + signal.SIGTERM] * len(codes), outputs
    assert "Traceback" not in "".join(outputs)
    steps = [point["step"] for point in run.points()]
    assert steps == [1, *range(5, steps[-1] + 1, 5)]  # none was lost
    assert run.summary()["checkpoint_failures"] == len(failures(run)) >= 1
    assert [finding for finding in check_run(run.folder) if finding.problem] == []


@pytest.mark.skipif(sys.platform != "linux", reason="another process's limits can be set on Linux alone")
def test_one_rank_that_cannot_write_keeps_no_checkpoint_from_the_others_for_ever(config):
    run = ForkedRun(config, "one_rank", *ENDLESS, "--checkpoint.async_mode", "async", ranks=2, replicas=2)
    run.wait_until(lambda: saved(run) > 0)
    unlimited = resource.prlimit(run.processes[1].pid, resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    check_that_it_goes_on(run, "File too large")
    resource.prlimit(run.processes[1].pid, resource.RLIMIT_FSIZE, unlimited)
    check_that_it_saves_again(run)
    end(run)


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 32 MB, unmounted afterwards with all that was mounted in it."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", tmp_path]
    mounted = subprocess.run(mount, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"file systems cannot be mounted here: {mounted.stderr.strip()}")
    yield tmp_path
    subprocess.run(["umount", "-R", "-l", tmp_path], check=True)


@pytest.mark.skipif(sys.platform != "linux", reason="mounts file systems")
def test_a_disk_that_is_full_and_then_a_folder_that_is_read_only_cost_checkpoints_alone(small_disk):
    run = ForkedRun(write_config(small_disk), "full", *ENDLESS, "--checkpoint.async_mode", "async")
    run.wait_until(lambda: saved(run) > 0)
    with open(small_disk / "filler", "wb", buffering=0) as filler, pytest.raises(OSError) as full:
        while True:
            filler.write(bytes(1 << 16))
    assert full.value.errno == errno.ENOSPC
    check_that_it_goes_on(run, "No space left on device")
    (small_disk / "filler").unlink()
    check_that_it_saves_again(run)

    checkpoints = run.folder / "checkpoint"
    subprocess.run(["mount", "--bind", checkpoints, checkpoints], check=True)
    read_only = ["mount", "-o", "remount,bind,ro", checkpoints]
    while subprocess.run(read_only, capture_output=True).returncode:  # a save is under way
        time.sleep(0.01)
    check_that_it_goes_on(run, "Read-only file system")
    subprocess.run(["umount", checkpoints], check=True)
    check_that_it_saves_again(run)
    end(run)


def test_a_slow_disk_holds_nothing_up_that_saves_beside_training_and_ends_nothing_that_waits(config, monkeypatch):
    # A save brings seven things to the disk, and takes longer than a phase of a step may.
    monkeypatch.setenv(FAULT, "0:slow disk:10")
    waits = ForkedRun(
        config, "waits", *SHORT, "--training.steps", "6", "--comm.train_timeout_seconds", "5", ranks=2, replicas=2
    )
    monkeypatch.setenv(FAULT, "0:slow disk:3")
    beside = ForkedRun(config, "beside", *ENDLESS, "--checkpoint.async_mode", "async")
    monkeypatch.delenv(FAULT)
    trained, most = 0, 0
    while saved(beside) < 20:
        assert beside.processes[0].poll() is None, beside.said()
        hidden = [path.name for path in (beside.folder / "checkpoint").glob(".step-*")]
        most = max(most, len(hidden))
        if hidden and beside.points():
            trained = max(trained, beside.points()[-1]["step"] - int(hidden[0].split("-")[1]))
        time.sleep(0.02)
    assert trained >= 5 and most == 1
    beside.processes[0].send_signal(signal.SIGTERM)
    codes, outputs = beside.wait()
    assert codes == [128 + signal.SIGTERM], outputs
    assert newest_good(beside.folder / "checkpoint")[0] == beside.summary()["step"]

    outputs = waits.finish()
    assert not (waits.folder / "faults").exists() and "in checkpoint" not in "".join(outputs)
    assert newest_good(waits.folder / "checkpoint") == (6, [])
