"""A job under its launcher of which one rank is stopped or killed, or which is asked to stop: it ends, and says why."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.end_to_end.runs import write_config
from tests.launcher import ROOT
from tests.process_state import children, process_state

LAUNCH = f"set -euo pipefail; source {ROOT}/scripts/status.sh; run_for_status \"$@\""


def rank_of(pid: int) -> str:
    variables = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return next(variable for variable in variables if variable.startswith("RANK="))


class Job:
    """Two ranks under torchrun under a launch script, endless."""

    def __init__(self, config: Path, name: str):
        self.folder = config.parent / "outputs" / name
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2",
            "--signals-to-handle", "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
            "train.py", "--job.config_file", str(config), "--job.dump_folder", str(config.parent / "outputs"),
            "--job.name", name, "--parallelism.data_parallel_replicate_degree", "2", "--training.steps", "100000",
            "--sampling.enable", "false", "--comm.train_timeout_seconds", "5",
        ]  # fmt: skip
        # After a failure torchrun ends the other processes, and a stopped one only when this time is over.
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "3"}
        self.output = open(config.parent / f"{name}.log", "w+")
        self.process = subprocess.Popen(
            ["bash", "-c", LAUNCH, "launch", *command], cwd=ROOT, env=environment, stdout=self.output,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            self.ranks = self._wait_for_step(10)
        except AssertionError:
            self.process.terminate()  # the script passes it on
            self.process.wait(300)
            raise

    def _wait_for_step(self, step: int) -> list[int]:
        """Process ids of the ranks once a point of that step is logged."""
        deadline, points = time.monotonic() + 300, self.folder / "metrics.jsonl"
        while time.monotonic() < deadline and self.process.poll() is None:
            if points.exists() and f'"step": {step},' in points.read_text():
                (torchrun,) = children(self.process.pid)
                return sorted(children(torchrun), key=rank_of)
            time.sleep(0.05)
        raise AssertionError(self.said())

    def end(self) -> int:
        """Exit code of the launch script; nothing of the job may be left."""
        try:
            code = self.process.wait(300)
            assert [process_state(pid) for pid in self.ranks] == ["gone", "gone"], self.said()
            return code
        finally:
            for pid in [*self.ranks, self.process.pid]:
                if process_state(pid) != "gone":
                    os.kill(pid, signal.SIGKILL)

    def said(self) -> str:
        self.output.seek(0)
        return self.output.read()

    def left(self, name: str) -> dict:
        return json.loads((self.folder / name).read_bytes())


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return write_config(tmp_path_factory.mktemp("lost"))


@pytest.mark.parametrize("number, known, victim", [
    (signal.SIGSTOP, "no report of rank 1: stopped, gone, or", 1), (signal.SIGKILL, "lost another rank in", 0),
])  # fmt: skip
def test_a_rank_that_is_stopped_or_killed_ends_the_job_with_what_is_known(config, number, known, victim):
    job = Job(config, number.name)
    os.kill(job.ranks[victim], number)
    assert job.end() == 1
    summary, status = job.left("summary.json"), job.left("status.json")
    assert (summary["status"], status["status"], status["exit_code"]) == ("failed", "failed", 1)
    assert summary["reason"] == status["reason"]
    assert known in summary["reason"], job.said()
    survivor = 1 - victim
    phases = "data|forward|backward|gradients|optimizer|ema|report|waiting|between phases"
    assert re.search(rf" in ({phases})[;:]", summary["reason"]), summary["reason"]
    assert summary["reason"].startswith(f"rank {survivor}")
    assert int(re.search(r"step (\d+):", summary["reason"])[1]) - summary["step"] in (0, 1)  # 1: of a step under way
    assert summary["reason"] in job.said() and "torchtitan/trainer.py" not in job.said()  # no traceback
    stacks = list((job.folder / "faults").glob(f"rank-{survivor:04d}-*-stacks.txt"))
    collectives = list((job.folder / "faults").glob(f"rank-{survivor:04d}-*-collectives.json"))
    if number == signal.SIGSTOP:
        # In a step's own collectives or in those of its report, whichever the other did not come to.
        assert re.search(r'torchtitan/trainer\.py", line \d+ in _loop', stacks[0].read_text())
        entries = json.loads(collectives[0].read_bytes())["entries"]
        assert "gloo:all_reduce" in {entry["profiling_name"] for entry in entries}
