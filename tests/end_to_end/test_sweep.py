"""A small sweep in real processes: it runs out of memory, crashes, is killed, and goes on."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launcher import ROOT
from tests.process_state import trainings_in

SWEEP = """
base = "base.toml"
memory_limit_gib = 1.5
warmup_steps = 2
[fixed]
training.steps = 12
training.max_norm = 0.0
[axes]
optimizer.lr = [1e-3, 1e38]
training.local_batch_size = [4096, 2, 2048]
[[exclude]]
optimizer.lr = 1e38
training.local_batch_size = [2048, 4096]
"""
BASE = """
[model]
flavor = "debug"
[data]
name = "synthetic"
kind = "constant"
shape = [4, 16, 16]
[lr_scheduler]
warmup_steps = 0
[metrics]
log_freq = 2
"""


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA limits memory on Linux only")
def test_a_sweep_that_is_killed_goes_on_and_records_how_each_run_ended(tmp_path):
    (tmp_path / "grid.toml").write_text(SWEEP)
    (tmp_path / "base.toml").write_text(BASE)
    output = tmp_path / "out"
    command = [sys.executable, "scripts/sweep.py", str(tmp_path / "grid.toml"), "--output", str(output)]
    options = {"cwd": ROOT, "text": True, "env": os.environ | {"OMP_NUM_THREADS": "1"}}

    first = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, **options)
    deadline = time.monotonic() + 300
    # The second run has begun, and is killed with the sweep.
    while not (output / "logs" / "optimizer.lr=0.001_batch=2048_r0.log").exists():
        assert first.poll() is None and time.monotonic() < deadline, first.communicate()
        time.sleep(0.05)
    first.kill()
    first.communicate()
    assert [row["status"] for row in _rows(output)] == ["ok"]
    deadline = time.monotonic() + 20
    while trainings_in(output):
        assert time.monotonic() < deadline
        time.sleep(0.05)

    done = subprocess.run(command, capture_output=True, timeout=300, **options)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    rows = {row["cell"]: row for row in _rows(output)}
    assert {cell: row["status"] for cell, row in rows.items()} == {
        "optimizer.lr=0.001_batch=2": "ok",
        "optimizer.lr=0.001_batch=2048": "oom",
        "optimizer.lr=0.001_batch=4096": "skipped",
        "optimizer.lr=1e+38_batch=2": "failed",
    }
    assert len(_rows(output)) == 4
    assert "can't allocate memory" in rows["optimizer.lr=0.001_batch=2048"]["reason"]
    assert "gradient norm" in rows["optimizer.lr=1e+38_batch=2"]["reason"]
    run = output / rows["optimizer.lr=0.001_batch=2"]["run"]
    assert json.loads((run / "summary.json").read_text())["status"] == "completed"
    assert f"{output}: 4 runs: 1 ok, 1 oom, 1 skipped, 1 failed" in done.stdout


def _rows(output: Path) -> list[dict]:
    return [json.loads(line) for line in (output / "sweep.jsonl").read_text().splitlines()]
