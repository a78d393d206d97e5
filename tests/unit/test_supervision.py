"""Event log and timeline, garbage control, memory monitor, and the status that becomes an exit code."""

import gc
import gzip
import json
import logging
import os
import subprocess

import pytest

from tests.launcher import ROOT
from torchtitan.runs.status import write_status
from torchtitan.supervision.events import EventLog
from torchtitan.supervision.garbage import GarbageControl
from torchtitan.training.memory_monitor import MemoryMonitor, host_memory
from torchtitan_dit.commands.timeline import main

GIB = 2**30


def log(folder, rank=0, step=0):
    return EventLog(folder, rank=rank, world_size=2, keep_every=10, step=step)


def lines(folder, rank=0):
    return [json.loads(line) for line in (folder / "events" / f"rank-{rank:04d}.jsonl").read_text().splitlines()]


def test_events_keep_logged_steps_and_long_phases_and_append_sessions(tmp_path):
    events = log(tmp_path)
    for step in range(1, 21):
        events.phase("forward", step, step * 1000, 500)
    events.phase("checkpoint", 13, 0, 10)
    assert len(lines(tmp_path)) == 1  # nothing is written between the logged points
    events.flush()
    events.fault("it fell", 20, "data")
    found = lines(tmp_path)
    assert [event["event"] for event in found] == ["session", *4 * ["phase"], "fault"]
    assert [event["step"] for event in found[1:]] == [1, 10, 20, 13, 20]
    assert found[2]["duration"] == pytest.approx(5e-7)
    assert found[2]["start"] - found[1]["start"] == pytest.approx(9e-6, abs=1e-6)

    path = tmp_path / "events" / "rank-0000.jsonl"
    path.write_bytes(path.read_bytes()[:-7])  # a kill in the middle of a line
    log(tmp_path, step=10)
    assert json.loads(path.read_text().splitlines()[-1])["event"] == "session"


def test_a_log_that_cannot_be_written_warns_once_and_costs_nothing_else(tmp_path, caplog):
    (tmp_path / "events").write_text("in the way")
    events = log(tmp_path)
    events.fault("it fell", 1, "data")
    assert len(caplog.records) == 1 and "events cannot be written" in caplog.text


def test_timeline_merges_ranks_and_leaves_damaged_lines_out(tmp_path, capsys):
    for rank in (0, 1):
        events = log(tmp_path, rank)
        events.phase("forward", 10, 1_000_000, 2_000_000)
        events.fault("it fell", 10, "data")
    with open(tmp_path / "events" / "rank-0001.jsonl", "a") as file:
        file.write('{"event": "phase", "name": "for')
    output = tmp_path / "trace.json.gz"
    assert main([str(tmp_path), "--output", str(output)]) == 0
    assert capsys.readouterr().out.strip() == f"{output}: 2 phases of 2 ranks, 1 damaged lines left out"
    trace = json.loads(gzip.decompress(output.read_bytes()))["traceEvents"]
    assert {entry["pid"] for entry in trace} == {0, 1}
    spans = [entry for entry in trace if entry["ph"] == "X"]
    assert [span["dur"] for span in spans] == pytest.approx([2000, 2000]) and spans[0]["args"] == {"step": 10}
    assert min(entry["ts"] for entry in trace if "ts" in entry) == 0
    assert sum(entry["ph"] == "i" and entry["name"] == "fault" for entry in trace) == 2


@pytest.mark.parametrize("content", [None, "", "[1]\n", '{"event": "phase"}\n'])
def test_timeline_of_a_folder_without_events_is_refused_in_one_line(tmp_path, capsys, content):
    if content is not None:
        (tmp_path / "events").mkdir()
        (tmp_path / "events" / "rank-0000.jsonl").write_text(content)
    assert main([str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


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
        with GarbageControl(0) as control:
            assert gc.isenabled() == automatic
        assert gc.isenabled() == automatic
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


def test_memory_warnings_come_once_each(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    monitor = MemoryMonitor(3, machine(tmp_path, {}, available_gib=5.1))
    monitor.check({})
    assert not caplog.records
    machine(tmp_path, {}, available_gib=4.9)
    for _ in range(3):
        monitor.check({})
    assert len(caplog.records) == 1 and "rank 3: 95.1 of 100.0 GiB of the machine's memory" in caplog.text
    for retries in (2, 2, 3, 4):  # what there was at the start is not a rise
        monitor.check({"memory/num_alloc_retries": retries})
    assert len(caplog.records) == 2 and "3 times so far" in caplog.text


@pytest.mark.parametrize(
    "status, code, wanted",
    [("completed", 0, 0), ("requeue", 143, 75), ("requeue", 1, 75), ("refused", 1, 2), ("failed", 1, 1), (None, 7, 7)],
)
def test_launch_script_turns_the_status_into_an_exit_code(tmp_path, monkeypatch, status, code, wanted):
    command = f"exit {code}"
    if status:
        monkeypatch.setenv("TRAIN_STATUS_FILE", str(tmp_path / "written"))
        write_status(tmp_path, status, code, 'with "status": "x" in it')
        assert (tmp_path / "written").read_bytes() == (tmp_path / "status.json").read_bytes()
        command = f"cp {tmp_path}/written $TRAIN_STATUS_FILE; {command}"
    script = f"set -euo pipefail; source {ROOT}/scripts/status.sh; run_for_status bash -c '{command}'"
    assert subprocess.run(["bash", "-c", script], env=os.environ | {"TMPDIR": str(tmp_path)}).returncode == wanted
    assert not list(tmp_path.glob("tmp.*"))
