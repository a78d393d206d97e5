"""The watchdog by a clock that the test moves, and the heartbeats that name the rank that is missing."""

import json
import os
import signal
import subprocess
import sys
import threading

import pytest

from torchtitan.distributed.config import CommConfig
from torchtitan.supervision import watchdog as watchdog_module
from torchtitan.supervision.heartbeat import Beat, Heartbeats, find_culprit, process_state, remove_heartbeats
from torchtitan.supervision.phases import BETWEEN_STEPS, Phases
from torchtitan.supervision.watchdog import Limits, Watchdog, limits

COMM = CommConfig(init_timeout_seconds=300, train_timeout_seconds=100, long_phase_timeout_seconds=1000)


class Clock:
    def __init__(self):
        self.seconds = 0.0

    def __call__(self) -> int:
        return int(self.seconds * 1e9)


class Watched:
    """A watchdog without its thread: `wait` moves the clock and looks as often as the thread would."""

    def __init__(self, folder, world_size=1, compiles=False):
        self.clock = Clock()
        self.phases = Phases(self.clock)
        self.reasons, self.codes = [], []
        self.watchdog = Watchdog(
            self.phases, COMM, folder, rank=0, world_size=world_size, compiles=compiles,
            describe=lambda phase: f"something of {phase}", on_end=self.reasons.append,
            end_process=self.codes.append,
        )  # fmt: skip

    def wait(self, seconds: float) -> None:
        """As long as the watchdog lets the process live."""
        until = self.clock.seconds + seconds
        while self.clock.seconds < until and not self.codes:
            self.clock.seconds += self.watchdog.interval
            self.watchdog.look()


def test_a_phase_that_stands_still_is_reported_and_then_ended(tmp_path, capfd):
    watched = Watched(tmp_path, world_size=2)
    watched.watchdog.first_step_done()
    watched.phases.step = 7
    with watched.phases("backward"):
        watched.wait(75)
        assert not capfd.readouterr().err
        watched.wait(10)
        report = capfd.readouterr().err
        assert not watched.codes and "-stacks.txt" in report
        watched.wait(100)
    assert watched.codes == [1] and 90 <= watched.clock.seconds < 96  # before the collectives' own 100 s
    line = watched.reasons[0]
    assert capfd.readouterr().err == f"{line}\n" and report.count("\n") == 1
    for word in ("rank 0", "step 7", "in backward", "something of backward", "comm.train_timeout_seconds"):
        assert word in line and word in report
    stacks = next((tmp_path / "faults").glob("rank-0000-*-stacks.txt")).read_text()
    assert "test_a_phase_that_stands_still" in stacks


def test_phases_that_change_and_forwards_inside_them_keep_a_process_alive(tmp_path, capfd):
    watched = Watched(tmp_path, world_size=2)
    watched.watchdog.first_step_done()
    for _ in range(10):
        with watched.phases("forward"):
            watched.wait(70)
    with watched.phases("sampling"):
        for _ in range(10):
            watched.wait(700)
            watched.phases.touch()
    assert not capfd.readouterr().err and not watched.codes
    with watched.phases("sampling"):
        watched.wait(2000)
    assert watched.codes and "comm.long_phase_timeout_seconds" in watched.reasons[0]


def test_a_process_that_was_itself_suspended_counts_anew(tmp_path, capfd):
    watched = Watched(tmp_path, world_size=2)
    watched.watchdog.first_step_done()
    with watched.phases("forward"):
        watched.wait(50)
        watched.clock.seconds += 5000  # stopped, and continued
        watched.wait(70)
        assert not capfd.readouterr().err
        watched.wait(30)
    assert watched.codes == [1]


def test_a_single_process_may_be_slow_but_says_so(tmp_path, capfd):
    watched = Watched(tmp_path)
    watched.watchdog.first_step_done()
    with watched.phases("data"):
        watched.wait(500)
        assert capfd.readouterr().err.count("\n") == 1 and not watched.codes
        watched.wait(500)
    assert watched.codes == [1]


@pytest.mark.parametrize(
    "phase, place, wanted",
    [
        ("forward", {}, Limits(80, 90, "comm.train_timeout_seconds")),
        ("forward", {"first_step": True}, Limits(280, 290, "comm.init_timeout_seconds")),
        ("forward", {"first_step": True, "compiles": True}, Limits(280, 900, "comm.long_phase_timeout_seconds")),
        ("forward", {"alone": True}, Limits(80, 900, "comm.long_phase_timeout_seconds")),
        ("checkpoint", {}, Limits(800, 900, "comm.long_phase_timeout_seconds")),
    ],
)
def test_limits(phase, place, wanted):
    found = limits(COMM, phase, **{"alone": False, "first_step": False, "compiles": False} | place)
    assert found == wanted


def beat(rank, changes=10, step=5, phase="backward", time=100.0, ended=None):
    return Beat(rank, "node", 1000 + rank, step, phase, changes, time, ended)


def test_the_culprit_is_who_is_gone_then_stopped_then_ended_first_then_behind():
    states = {}

    def state(beat):
        return states.get(beat.rank, "running")

    beats = {0: beat(0), 1: beat(1), 2: beat(2, changes=8, step=4, phase="data"), 3: beat(3)}
    assert find_culprit(beats, 0, state) == "rank 2 (node, process 1002) is behind, at step 4 in data"
    assert find_culprit(beats, 0, state, behind=False) is None
    beats |= {1: beat(1, time=120.0, ended="step 5: the network"), 3: beat(3, time=110.0, ended="step 5: an image")}
    assert find_culprit(beats, 0, state) == "rank 3 (node, process 1003) ended: step 5: an image"
    states[2] = "stopped"
    assert find_culprit(beats, 0, state) == "rank 2 (node, process 1002) is stopped, last seen at step 4 in data"
    states |= {1: "gone", 3: "gone"}  # they have said why: not the cause
    beats[4], states[4] = beat(4), "gone"
    assert find_culprit(beats, 0, state).startswith("rank 4 (node, process 1004) is gone")
    assert find_culprit({0: beat(0), 1: beat(1)}, 0, lambda beat: "running") is None


def test_heartbeats_are_read_back_and_a_damaged_one_is_passed_over(tmp_path):
    ranks = [Heartbeats(tmp_path, rank, 3, interval=1.0) for rank in range(3)]
    for rank in ranks:
        rank.beat(3, "data", 12)
    folder = tmp_path / "faults" / "heartbeat"
    found = ranks[0].read()
    assert [found[rank].rank for rank in found] == [0, 1, 2] and found[1].pid == os.getpid()
    (folder / "rank-0001.json").write_text("{")
    assert sorted(ranks[0].read()) == [0, 2]
    assert ranks[0].writes_summary() and not ranks[2].writes_summary()
    ranks[0].beat(3, "data", 12, ended="no data")  # it has written the summary
    assert not ranks[2].writes_summary()
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    content = json.loads((folder / "rank-0000.json").read_bytes())
    (folder / "rank-0000.json").write_text(json.dumps(content | {"pid": gone.pid, "ended": None}))
    assert ranks[2].writes_summary() and "is gone" in ranks[2].certain_culprit(wait=0)
    for rank in ranks:
        rank.remove()
    assert not (tmp_path / "faults").exists()
    ranks[0].beat(1, "data", 1)
    remove_heartbeats(tmp_path)
    assert not folder.exists()


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="needs /proc")
def test_process_states():
    assert process_state(os.getpid()) == "running"
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        child.send_signal(signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)
        assert process_state(child.pid) == "stopped"
    finally:
        os.kill(child.pid, signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert process_state(child.pid) == "gone"  # a zombie
    child.wait()
    assert process_state(child.pid) == "gone"


def test_phases_nest_and_name_the_one_that_failed():
    clock, begun = Clock(), []
    phases = Phases(clock, lambda *boundary: begun.append(boundary))
    phases.step = 3
    with pytest.raises(KeyError), phases("checkpoint"):
        clock.seconds += 1
        with phases("data"):
            clock.seconds += 2
            assert phases.name == "data" and phases.changes == 2
        assert phases.name == "checkpoint"
        {}["missing"]
    assert phases.name == BETWEEN_STEPS and phases.where == "checkpoint" and phases.changes == 4
    assert begun == [("checkpoint", 0), ("data", 10**9), ("checkpoint", 3 * 10**9), (BETWEEN_STEPS, 3 * 10**9)]


def test_a_file_system_that_hangs_cannot_keep_the_watchdog_from_ending_the_process(tmp_path, monkeypatch):
    monkeypatch.setattr(watchdog_module, "_PATIENCE", 0.05)
    watched = Watched(tmp_path, world_size=2)
    watched.watchdog.first_step_done()
    released, before = threading.Event(), threading.enumerate()
    monkeypatch.setattr(watched.watchdog.heartbeats, "culprit", lambda: released.wait(60) and None)
    with watched.phases("checkpoint"):
        watched.wait(1000)
    assert watched.codes == [1] and not watched.reasons
    released.set()
    for thread in set(threading.enumerate()) - set(before):
        thread.join()
