"""How a run in fresh processes ended, told from real ones."""

import os
import signal
import sys
import threading
import time

import pytest

from tests.process_state import trainings_in
from torchtitan.experiments.process import Stopped, repeat_killed, run_processes

CONFIG = """
[model]
flavor = "debug"
[data]
name = "synthetic"
kind = "constant"
shape = [4, 16, 16]
[training]
steps = 2
local_batch_size = 2
[lr_scheduler]
warmup_steps = 0
[metrics]
log_freq = 1
enable_tensorboard = false
[checkpoint]
enable = false
[sampling]
enable = false
[validation]
enable = false
"""


@pytest.fixture
def start(tmp_path):
    config = tmp_path / "small.toml"
    config.write_text(CONFIG)

    def started(*overrides: str, **options):
        arguments = ["--job.config_file", str(config), "--job.dump_folder", str(tmp_path), "--job.name", "run"]
        options = {"timeout_s": 120, "environment": {"OMP_NUM_THREADS": "1"}} | options
        log, retries = tmp_path / "run.log", options.pop("retries", 0)
        return repeat_killed(lambda: run_processes([*arguments, *overrides], log=log, **options), log, retries)

    return started


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_rank_that_is_preempted_is_started_again_and_is_not_out_of_memory(start, tmp_path):
    killed = []

    def preempt() -> None:
        for pid, words in {} if killed else trainings_in(tmp_path).items():
            if words[1].endswith("train.py"):
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)

    outcome = start(poll=preempt, retries=1)
    assert (outcome.status, outcome.reason) == ("ok", "") and len(killed) == 1
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2
    assert "run.killed1.log" in os.listdir(tmp_path)


def test_a_refusal_is_told_from_a_stale_summary(start, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").write_text('{"host": "a", "pid": 1, "started": "an earlier attempt"}')
    (tmp_path / "run" / "summary.json").write_text('{"status": "oom", "reason": "of an earlier attempt"}')
    refused = start("--training.local_batch_size", "0")
    assert refused.status == "refused" and "training.local_batch_size" in refused.reason


def test_a_run_that_takes_too_long_leaves_no_process(start, tmp_path):
    outcome = start("--training.steps", "1000000", timeout_s=3)
    assert outcome.status == "timeout" and "3 s" in outcome.reason
    assert outcome.seconds < 30
    _wait_until(lambda: trainings_in(tmp_path) == {})  # what was killed stays in /proc until it is reaped


def test_a_run_that_is_stopped_with_grace_saves_a_checkpoint_first(start, tmp_path):
    """The run is stopped once it has logged a step; without grace it would leave no checkpoint."""
    stop, metrics = threading.Event(), tmp_path / "run" / "metrics.jsonl"

    def poll() -> None:
        if metrics.exists() and metrics.stat().st_size:
            stop.set()

    words = ["--training.steps", "1000000", "--checkpoint.enable", "true", "--checkpoint.interval", "1000000"]
    with pytest.raises(Stopped):
        start(*words, stop=stop, poll=poll, stop_grace_s=60)
    assert list((tmp_path / "run" / "checkpoint").glob("step-*/manifest.json"))
    _wait_until(lambda: trainings_in(tmp_path) == {})  # what was killed stays in /proc until it is reaped


def _wait_until(condition, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
