"""What a rank leaves behind that is killed: no process of its own."""

import signal
import sys
import time
from pathlib import Path

import pytest

from tests.end_to_end.runs import write_config
from tests.faults.forked import ForkedRun
from tests.process_state import process_state


def descendants(pid: int) -> list[int]:
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, path.read_text().split()):
            found += [child, *descendants(child)]
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
def test_loader_processes_end_with_a_rank_that_is_killed(tmp_path):
    run = ForkedRun(
        write_config(tmp_path), "killed", "--data.num_workers", "2", "--training.steps", "100000",
        "--sampling.enable", "false", "--checkpoint.enable", "false",
    )  # fmt: skip
    run.wait_for_step(5)
    left = descendants(run.processes[0].pid)
    assert len(left) >= 2
    run.send(signal.SIGKILL)
    run.wait()
    deadline = time.monotonic() + 30
    while {process_state(pid) for pid in left} != {"gone"}:
        assert time.monotonic() < deadline, [process_state(pid) for pid in left]
        time.sleep(0.05)
