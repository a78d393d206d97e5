"""How a run in fresh processes ended, told from real ones."""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.launcher import ROOT
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
# Given to every rank through sitecustomize: what makes one rank fail alone.
FAILING_RANK = """
import os, sys
if os.environ.get("RANK", "0") == "1" and "train.py" in " ".join(sys.orig_argv):
    import torch.optim
    step = torch.optim.AdamW.step
    def failing(*args, **kwargs):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes.")
    torch.optim.AdamW.step = failing
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


def test_a_rank_that_is_out_of_memory_alone_ends_the_group(start, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(FAILING_RANK)
    outcome = start(processes=2, environment={"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}, timeout_s=100)
    assert outcome.status == "oom" and "allocate memory" in outcome.reason, outcome
    assert outcome.seconds < 90


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_rank_that_is_preempted_is_started_again_and_is_not_out_of_memory(start, tmp_path):
    killed = []

    def preempt() -> None:
        found = [] if killed else _train_processes(tmp_path)
        for pid in found:
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)

    outcome = start(poll=preempt, retries=1)
    assert (outcome.status, outcome.reason, outcome.exit_code) == ("ok", "", 0) and len(killed) == 1
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2
    assert "run.killed1.log" in os.listdir(tmp_path)
    killed.clear()
    outcome = start(poll=preempt, retries=0)
    assert (outcome.status, outcome.exit_code) == ("killed", 137), outcome
    assert outcome.reason.startswith("a rank was killed by SIGKILL")


def test_a_crash_is_told_from_a_refusal_and_from_a_stale_summary(start, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").write_text('{"host": "a", "pid": 1, "started": "an earlier attempt"}')
    (tmp_path / "run" / "summary.json").write_text('{"status": "oom", "reason": "of an earlier attempt"}')
    refused = start("--training.local_batch_size", "0")
    assert refused.status == "refused" and "training.local_batch_size" in refused.reason

    failed = start("--optimizer.lr", "1e38", "--training.max_norm", "0", "--training.steps", "20")
    assert failed.status == "failed" and "gradient norm" in failed.reason, failed


def test_a_run_that_takes_too_long_leaves_no_process(start, tmp_path):
    outcome = start("--training.steps", "1000000", processes=2, timeout_s=7)
    assert outcome.status == "timeout" and "7 s" in outcome.reason
    assert outcome.seconds < 30
    _wait_until(lambda: _processes_of(tmp_path) == [])  # what was killed stays in /proc until it is reaped


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
    _wait_until(lambda: _processes_of(tmp_path) == [])  # what was killed stays in /proc until it is reaped


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_nothing_outlives_a_caller_that_was_killed(tmp_path):
    config = tmp_path / "small.toml"
    config.write_text(CONFIG)
    words = [f"--job.config_file={config}", f"--job.dump_folder={tmp_path}", "--training.steps=1000000"]
    caller = "from pathlib import Path; from torchtitan.experiments.process import run_processes; "
    caller += f"run_processes({words}, processes=2, timeout_s=600, log=Path({str(tmp_path / 'log')!r}))"
    process = subprocess.Popen([sys.executable, "-c", caller], cwd=ROOT)
    _wait_until(lambda: len(_processes_of(tmp_path)) > 2 and (tmp_path / "log").stat().st_size, seconds=240)
    process.kill()
    process.wait()
    _wait_until(lambda: _processes_of(tmp_path) == [])


def _wait_until(condition, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _command_lines() -> dict[int, str]:
    found = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            found[int(path.parent.name)] = path.read_text()
    return found


def _train_processes(folder: Path) -> list[int]:
    words = {process: line.split("\0") for process, line in _command_lines().items() if str(folder) in line}
    return [process for process, each in words.items() if len(each) > 2 and each[1].endswith("train.py")]


def _processes_of(folder: Path) -> list[str]:
    return [line for line in _command_lines().values() if str(folder) in line and "train.py" in line]
