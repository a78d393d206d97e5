"""The watchdog by a clock that the test moves."""

import json
import os
import threading
from types import SimpleNamespace

import pytest
import torch

from torchtitan.distributed.config import CommConfig
from torchtitan.supervision import watchdog as watchdog_module
from torchtitan.supervision.watchdog import Limits, Watchdog, limits, silent_ranks
from torchtitan.training.clock import BETWEEN_STEPS, Phases

COMM = CommConfig(init_timeout_seconds=300, train_timeout_seconds=100)


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
            on_end=self.reasons.append,
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
    assert "no report of rank 1: stopped, gone, or holding" in line and "no report" not in report
    for word in ("rank 0", "step 7", "in backward", "comm.train_timeout_seconds"):
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
    assert watched.codes and "comm.init_timeout_seconds" in watched.reasons[0]


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
        watched.wait(1500)
    assert watched.codes == [1]


@pytest.mark.parametrize(
    "phase, place, wanted",
    [
        ("forward", {}, Limits(80, 90, "comm.train_timeout_seconds")),
        ("forward", {"first_step": True}, Limits(280, 290, "comm.init_timeout_seconds")),
        ("forward", {"first_step": True, "compiles": True}, Limits(280, 1620, "comm.init_timeout_seconds")),
        ("forward", {"alone": True}, Limits(80, 1620, "comm.init_timeout_seconds")),
        ("checkpoint", {}, Limits(1440, 1620, "comm.init_timeout_seconds")),
    ],
)
def test_limits(phase, place, wanted):
    found = limits(COMM, phase, **{"alone": False, "first_step": False, "compiles": False} | place)
    assert found == wanted


def test_ranks_are_silent_that_left_no_stacks_since_the_run_began(tmp_path):
    assert silent_ranks(tmp_path / "none", 2, 0.0) == [0, 1]
    for name, written in {"rank-0000-a-stacks.txt": 200, "rank-0001-a-stacks.txt": 99, "rank-0002-a-collectives.json": 200,
                          "rank-0003-a-stacks.txt": 100, "rank-x-stacks.txt": 200}.items():  # fmt: skip
        (tmp_path / name).write_text("")
        os.utime(tmp_path / name, (written, written))
    assert silent_ranks(tmp_path, 5, 100.0) == [1, 2, 4]


def collective(name: str, created: int) -> dict:
    return {"profiling_name": name, "time_created_ns": created}


@pytest.mark.parametrize("recorders", [
    {},
    {"_dump_fr_trace_json": []},
    {"_dump_nccl_trace_json": [], "_dump_fr_trace_json": [collective("gloo:barrier", 1)]},  # CUDA's build on processors
    {"_dump_nccl_trace_json": [collective("nccl:all_reduce", 2), collective("nccl:all_gather", 4)],
     "_dump_fr_trace_json": [collective("gloo:barrier", 3)]},
])  # fmt: skip
def test_collectives_of_every_recorder_are_kept_by_time_and_none_is_said(recorders, tmp_path, monkeypatch):
    def dump_of(entries: list[dict]):
        return lambda: json.dumps({"version": "2.10", "pg_config": {}} | ({"entries": entries} if entries else {}))

    module = SimpleNamespace(**{name: dump_of(entries) for name, entries in recorders.items()})
    monkeypatch.setattr(torch._C, "_distributed_c10d", module)
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "2000")
    summary = watchdog_module.dump_state(tmp_path, 3)
    assert "rank-0003-" in summary and len(list(tmp_path.glob("*-stacks.txt"))) == 1
    wanted = sorted((entry["time_created_ns"], entry["profiling_name"]) for entries in recorders.values() for entry in entries)
    written = list(tmp_path.glob("*-collectives.json"))
    assert ("has recorded no collectives" in summary) == (not wanted) and len(written) == bool(wanted)
    for path in written:
        record = json.loads(path.read_bytes())
        assert [(entry["time_created_ns"], entry["profiling_name"]) for entry in record["entries"]] == wanted
        assert record["version"] == "2.10" and str(path) in summary


def test_phases_nest_and_name_the_one_that_failed():
    clock, begun = Clock(), []
    phases = Phases(clock, lambda *boundary: begun.append(boundary))
    phases.step = 3
    with pytest.raises(KeyError), phases("checkpoint"):
        clock.seconds += 1
        with phases("data"):
            clock.seconds += 2
            assert phases.name == "data"
        assert phases.name == "checkpoint"
        {}["missing"]
    assert phases.name == BETWEEN_STEPS and phases.where == "checkpoint"
    assert begun == [("checkpoint", 0), ("data", 10**9), ("checkpoint", 3 * 10**9), (BETWEEN_STEPS, 3 * 10**9)]


def test_a_file_system_that_hangs_cannot_keep_the_watchdog_from_ending_the_process(tmp_path, monkeypatch):
    monkeypatch.setattr(watchdog_module, "_PATIENCE", 0.05)
    watched = Watched(tmp_path, world_size=2)
    watched.watchdog.first_step_done()
    released, before = threading.Event(), threading.enumerate()
    monkeypatch.setattr(watchdog_module, "silent_ranks", lambda *_: released.wait(60) and [])
    with watched.phases("checkpoint"):
        watched.wait(2000)
    assert watched.codes == [1] and not watched.reasons
    released.set()
    for thread in set(threading.enumerate()) - set(before):
        thread.join()
