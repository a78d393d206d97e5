"""Garbage control, the host's memory, who closes a failed run, and the status that becomes an exit code."""

import gc
import json
import os
import signal
import subprocess
import threading
from functools import partial
from types import SimpleNamespace

import pytest
from torch import nn

from tests.launcher import ROOT
from torchtitan.distributed.config import CommConfig, CompileConfig
from torchtitan.run import _train
from torchtitan.runs.status import write_status
from torchtitan.supervision.garbage import GarbageControl
from torchtitan.supervision.supervision import Supervision
from torchtitan.training.clock import Phases
from torchtitan.training.host_memory import host_memory

GIB = 2**30


@pytest.mark.parametrize("automatic", [True, False])
def test_garbage_is_collected_at_its_steps_only_and_the_collector_is_left_as_it_was(automatic):
    before = gc.isenabled()
    (gc.enable if automatic else gc.disable)()
    collections = []

    def note(phase, info):
        if phase == "start":
            collections.append(info["generation"])

    gc.callbacks.append(note)
    try:
        with GarbageControl(3) as control:
            assert not gc.isenabled()
            collections.clear()
            counts = []
            for step in range(1, 10):
                control.step(step)
                counts.append(len(collections))
        assert counts == [0, 0, 1, 1, 1, 2, 2, 2, 3] and gc.isenabled() == automatic
    finally:
        gc.callbacks.remove(note)
        (gc.enable if before else gc.disable)()


def machine(root, group: dict[str, str], available_gib: float, line: str = "0::/job"):
    files = {"proc/self/cgroup": line + "\n", **group}
    files["proc/meminfo"] = f"MemTotal:  {100 * 2**20} kB\nMemAvailable:  {int(available_gib * 2**20)} kB\n"
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return root


def test_host_memory_is_read_from_both_control_group_versions_and_the_machine(tmp_path):
    two = machine(tmp_path / "2", {
        "sys/fs/cgroup/job/memory.max": str(10 * GIB),
        "sys/fs/cgroup/job/memory.stat": f"anon {4 * GIB}\nfile {5 * GIB}\nshmem {GIB}\n",
    }, 60)  # fmt: skip
    assert [row[1:] for row in host_memory(two)] == [(5 * GIB, 10 * GIB), (40 * GIB, 100 * GIB)]
    one = machine(tmp_path / "1", {
        "sys/fs/cgroup/memory/memory.limit_in_bytes": str(8 * GIB),
        "sys/fs/cgroup/memory/memory.stat": f"rss {GIB}\ntotal_rss {2 * GIB}\n",
    }, 60, line="4:cpu,memory:/not/mounted/here")  # fmt: skip
    assert host_memory(one)[0][1:] == (2 * GIB, 8 * GIB)
    unlimited = {"sys/fs/cgroup/job/memory.max": "max", "sys/fs/cgroup/job/memory.stat": "anon 1\n"}
    free = machine(tmp_path / "free", unlimited, 60)
    assert len(host_memory(free)) == 1
    assert host_memory(tmp_path / "nothing") == []


def test_the_rank_that_fails_first_closes_the_run_and_the_others_add_its_reason(tmp_path, caplog):
    closed = []
    config = SimpleNamespace(comm=CommConfig(), compile=CompileConfig())
    ranks = [
        Supervision(
            SimpleNamespace(
                config=config, layout=SimpleNamespace(rank=rank, world_size=2), folder=SimpleNamespace(path=tmp_path),
                model=nn.Identity(),
            ), Phases(), lambda *end: closed.append(end),
        )
        for rank in (0, 1)
    ]  # fmt: skip
    ranks[1].failed("failed", "step 7: no data", lost=False)
    ranks[0].failed("failed", "step 7: lost another rank in backward: closed", lost=True)
    assert closed == [("failed", "rank 1: step 7: no data")]
    assert json.loads((tmp_path / "status.json").read_text())["reason"] == closed[0][1]
    assert caplog.messages == [
        "rank 1: step 7: no data", "rank 0: step 7: lost another rank in backward: closed; rank 1: step 7: no data",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "status, code, wanted",
    [("completed", 0, 0), ("requeue", 143, 75), ("refused", 1, 2), ("failed", 1, 1)],
)
def test_launch_script_turns_the_status_into_an_exit_code(tmp_path, monkeypatch, status, code, wanted):
    monkeypatch.setenv("TRAIN_STATUS_FILE", str(tmp_path / "written"))
    write_status(tmp_path, status, code, 'with "status": "x" in it')
    assert (tmp_path / "written").read_bytes() == (tmp_path / "status.json").read_bytes()
    command = f'cp {tmp_path}/status.json "$TRAIN_STATUS_FILE"; exit {code}'
    script = f"set -euo pipefail; source {ROOT}/scripts/status.sh; run_for_status bash -c '{command}'"
    for name in ("", str(tmp_path / "a caller's")):
        environment = os.environ | {"TMPDIR": str(tmp_path), "TRAIN_STATUS_FILE": name}
        assert subprocess.run(["bash", "-c", script], env=environment).returncode == wanted
    assert (tmp_path / "a caller's").read_bytes() == (tmp_path / "status.json").read_bytes()
    assert not list(tmp_path.glob("tmp.*"))


def test_a_run_that_code_of_a_plugin_ends_has_a_reason(monkeypatch):
    def broken():
        raise AttributeError("no images")

    ends = []
    supervision = SimpleNamespace(failed=lambda *end: ends.append(end))
    trainer = SimpleNamespace(train=broken, state=SimpleNamespace(step=3), supervision=supervision)
    with pytest.raises(AttributeError):
        _train(trainer, threading.Timer(60, lambda: None))
    assert ends == [("failed", "step 3: AttributeError: no images", False)]


@pytest.mark.parametrize(("name", "end", "wanted"), [
    ("USR1", "exec sleep 20", 75), ("TERM", "exec sleep 20", 75), ("INT", "exec sleep 20", 130),
    ("INT", 'trap "exit 1" INT; sleep 20 & wait', 130),  # as a launcher of several processes ends
])  # fmt: skip
def test_command_that_a_signal_ends_before_it_could_save_is_run_again_but_for_ctrl_c(name, end, wanted):
    command = f"trap - INT; (sleep 0.2; kill -{name} $job) & {end}"  # of this shell, which passes it on
    script = f"set -euo pipefail; source {ROOT}/scripts/status.sh; export job=$$; run_for_status bash -c '{command}'"
    # Of a shell in the background Ctrl-C is ignored, and by all that it starts.
    default = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    assert subprocess.run(["bash", "-c", script], preexec_fn=default).returncode == wanted
