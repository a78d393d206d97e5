"""Whole runs that save beside training: refused a second time, killed, resumed, checked; and one that cannot save."""

import signal
import socket
import time

import pytest
import torch

from tests.end_to_end.runs import checkpoint_tensors, write_config
from tests.faults.forked import ForkedRun
from torchtitan.runs.check import check_run

SHORT = ("--sampling.enable", "false", "--checkpoint.interval", "10", "--training.steps", "60")


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return write_config(tmp_path_factory.mktemp("async"))


def test_killed_run_with_asynchronous_checkpoints_ends_as_a_straight_one_without(config, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "secret-0123456789abcdef")
    straight = ForkedRun(config, "straight", *SHORT)
    straight.finish()
    asynchronous = (*SHORT, "--checkpoint.async_mode", "async")
    killed = ForkedRun(config, "killed", *asynchronous)
    killed.wait_for_step(15)
    killed.send(signal.SIGSTOP)  # it holds the folder, but does not end meanwhile
    second = ForkedRun(config, "killed", *asynchronous)
    codes, outputs = second.wait(300)
    killed.send(signal.SIGKILL)
    killed.wait()
    assert codes == [75] and "Traceback" not in outputs[0]
    owner = f"host {socket.gethostname()}, process {killed.processes[0].pid}, since"
    assert f"another process writes here: {owner}" in outputs[0]

    resumed = ForkedRun(config, "killed", *asynchronous)
    assert "resumed after step" in resumed.finish()[0]
    assert resumed.losses() == straight.losses()
    wanted = checkpoint_tensors(straight.folder / "checkpoint" / "step-00000060")
    found = checkpoint_tensors(resumed.folder / "checkpoint" / "step-00000060")
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert not [finding for finding in check_run(resumed.folder) if finding.problem]
    assert "checkpoint_failures" not in resumed.summary()
    written = [path for path in resumed.folder.rglob("*") if path.is_file()]
    assert len(written) > 5 and not any(b"secret-0123456789abcdef" in path.read_bytes() for path in written)


def test_run_that_cannot_save_trains_on_to_its_end_and_then_fails(config):
    run = ForkedRun(config, "full", *SHORT, "--training.steps", "20", "--checkpoint.async_mode", "async")
    while not (run.folder / "config.toml").exists() and run.processes[0].poll() is None:
        time.sleep(0.001)  # then the folder is the run's
    (run.folder / "checkpoint").write_text("in the way")
    codes, outputs = run.wait()
    assert codes == [1] and "Traceback" not in outputs[0]
    assert outputs[0].count("nothing of it is kept, and the next save tries again where training continues") == 2
    assert run.points()[-1]["step"] == 20
    summary = run.summary()
    assert (summary["status"], summary["step"], summary["checkpoint_failures"]) == ("failed", 20, 2)
    assert "the last checkpoint was not saved (the same command begins anew)" in summary["reason"]
