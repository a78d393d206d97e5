"""Heartbeats of several machines: one file for each on the shared disk, and every rank known to every other."""

import os
import time
from pathlib import Path

import pytest

from torchtitan.supervision import heartbeat, node_folder
from torchtitan.supervision.heartbeat import Heartbeats

RANKS, HERE = 6, 3  # two machines of three


class Machines:
    """Two machines in one process, with a clock that the test moves and processes that it stops."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.run, self.now, self.stopped = tmp_path / "run", 1000.0, set()
        self.shared = self.run / "faults" / "heartbeat"
        monkeypatch.setattr(heartbeat.time, "time", lambda: self.now)
        self.ranks = []
        for rank in range(RANKS):
            machine = tmp_path / f"machine-{rank // HERE}"
            machine.mkdir(exist_ok=True)
            monkeypatch.setattr(heartbeat, "node_folder", lambda folder, is_own, machine=machine: machine)
            monkeypatch.setattr(heartbeat.socket, "gethostname", lambda rank=rank: f"node{rank // HERE}")
            monkeypatch.setattr(heartbeat.os, "getpid", lambda rank=rank: 100 + rank)
            self.ranks.append(Heartbeats(self.run, rank, RANKS, interval=1.0, ranks_here=HERE))
        self._pids = monkeypatch
        monkeypatch.setattr(heartbeat, "process_state", lambda pid: "stopped" if pid - 100 in self.stopped else "running")

    def beat(self, *ranks: int, changes: int = 1, ended: str | None = None) -> None:
        for rank in ranks:
            self._pids.setattr(heartbeat.os, "getpid", lambda rank=rank: 100 + rank)
            self.ranks[rank].beat(3, "backward", changes, ended)

    def files(self) -> list[str]:
        return sorted(path.name for path in self.shared.iterdir())


@pytest.fixture
def machines(tmp_path, monkeypatch) -> Machines:
    return Machines(tmp_path, monkeypatch)


def test_the_shared_disk_sees_one_file_a_machine_and_all_know_all(machines):
    for _ in range(3):  # at first, ranks that beat before the lowest write for themselves
        machines.beat(5, 4, 3, 2, 1, 0)
        machines.now += 1
    assert machines.files() == ["node-0000.json", "node-0003.json"]
    for rank in machines.ranks:
        found = rank.read()
        assert list(found) == list(range(RANKS))
        assert [(beat.host, beat.pid) for beat in found.values()] == [(f"node{r // HERE}", 100 + r) for r in range(RANKS)]


def test_the_next_rank_writes_where_the_lowest_stands_still_and_the_lost_one_is_named_on_both_machines(machines):
    machines.beat(*range(RANKS))
    machines.stopped.add(3)
    for _ in range(6):
        machines.now += 1
        machines.beat(0, 1, 2, 4, 5)
    assert "node-0004.json" in machines.files() and "node-0005.json" not in machines.files()
    assert machines.ranks[5].certain_culprit(0) == "rank 3 (node1, process 103) is stopped, last seen at step 3 in backward"
    assert machines.ranks[0].certain_culprit(0) == (
        "rank 3 (node1, process 103) is silent for 6 s, last seen at step 3 in backward"
    )
    machines.stopped.clear()
    machines.beat(3, 4, 5)
    assert machines.files() == ["node-0000.json", "node-0003.json"]


def test_a_process_that_holds_its_lock_is_passed_over_and_named(machines):
    machines.beat(*range(RANKS))
    for _ in range(6):
        machines.now += 1
        machines.beat(1, 2, 3, 4, 5)  # rank 0 runs, and writes nothing
    assert "rank 0 (node0, process 100) is silent for 6 s" in machines.ranks[4].certain_culprit(0)
    assert list(machines.ranks[4].read()) == list(range(RANKS))


def test_an_end_is_known_on_the_other_machine_at_once(machines):
    machines.beat(*range(RANKS))
    machines.beat(5, ended="step 3: no data")
    machines.beat(3, 4)
    assert machines.ranks[0].certain_culprit(0) == "rank 5 (node1, process 105) ended: step 3: no data"


def test_nothing_is_left_of_a_run_that_went_well(machines, tmp_path):
    machines.beat(*range(RANKS))
    for rank in machines.ranks:
        rank.remove()
    assert [path.name for path in tmp_path.rglob("*")] == ["run"]


def test_ranks_without_a_common_folder_write_for_themselves(machines, monkeypatch):
    def nowhere(folder, is_own):
        raise PermissionError("another user's")

    monkeypatch.setattr(heartbeat, "node_folder", nowhere)
    for rank in range(2):
        Heartbeats(machines.run, rank, RANKS, 1.0, ranks_here=HERE).beat(1, "data", 1)
    assert machines.files() == ["rank-0000.json", "rank-0001.json"]
    assert list(machines.ranks[3].read()) == [0, 1]


def made(run):
    return node_folder.node_folder(Path(run), lambda name: name.endswith(".json"))


def test_a_machines_folder_is_that_of_the_launch_and_killed_ones_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(node_folder, "_MEMORY", tmp_path)
    ours = made("run")
    assert made("run") == ours and made("other") != ours
    assert ours.stat().st_mode & 0o777 == 0o700
    (ours / "rank-0000.json").write_text("{}")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    again = made("run")
    assert again != ours and ours.exists()
    old = time.time() - 7200
    os.utime(ours, (old, old))
    (ours / "notes.txt").write_text("of someone else")
    os.utime(ours, (old, old))
    assert made("run") == again and [path.name for path in ours.iterdir()] == ["notes.txt"]
    (ours / "notes.txt").unlink()
    os.utime(ours, (old, old))
    assert made("run") == again and not ours.exists()
    again.rmdir()
    again.symlink_to(tmp_path)
    with pytest.raises(OSError, match="another user"):
        made("run")
