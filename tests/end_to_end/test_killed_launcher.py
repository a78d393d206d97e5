"""torchrun killed by SIGKILL: its ranks and their loaders end with it."""

import os
import signal
import sys
import time

import pytest

from tests.end_to_end.runs import Run, write_config
from tests.end_to_end.test_launchers import torchrun
from tests.process_state import descendants, process_state

QUICK = ("--training.steps", "60", "--checkpoint.interval", "10", "--sampling.enable", "false")


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone has a signal of the parent's death")
def test_nothing_outlives_a_killed_torchrun(tmp_path):
    config = write_config(tmp_path)
    layout = ("--parallelism.data_parallel_replicate_degree", "2", "--data.num_workers", "1")
    process = torchrun(config, "killed", "--standalone", "--nproc_per_node", "2", train=(*QUICK, *layout))
    run = Run(tmp_path / "outputs" / "killed", [process])
    run.wait_for_step(15)
    left = descendants(process.pid)
    assert len(left) >= 4  # two ranks, a loader process of each
    process.kill()
    process.wait()
    started = time.monotonic()
    try:
        while {process_state(pid) for pid in left} != {"gone"}:
            assert time.monotonic() - started < 5, [process_state(pid) for pid in left]
            time.sleep(0.02)
    finally:
        process.stdout.close()
        for pid in left:
            if process_state(pid) != "gone":
                os.kill(pid, signal.SIGKILL)
    assert run.points()[-1]["step"] < 60
