"""The clock of runs that are killed and stopped: training counts once, and the parts add up."""

import json
import os
import signal
import time

import pytest

from tests.end_to_end.runs import CONFIG
from tests.end_to_end.ticking import TICK, train
from tests.faults.forked import ForkedRun
from tests.forked import ForkedProcess
from torchtitan.training.clock import PARTS, TRAIN_PARTS

MORE = """
[validation]
enable = true
interval = 6
num_images = 16
"""
OPTIONS = (
    "--training.steps", "16", "--checkpoint.interval", "4", "--metrics.log_freq", "2", "--sampling.interval", "8",
)  # fmt: skip


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = tmp_path_factory.mktemp("clock") / "small.toml"
    path.write_text(CONFIG + MORE)
    return path


def ticked(config, name, kill_after=0):
    outputs = config.parent / "outputs"
    words = ["--job.config_file", str(config), "--job.dump_folder", str(outputs), "--job.name", name, *OPTIONS]
    process = ForkedProcess(train, (words, kill_after), os.environ | {"RANK": "0", "LOCAL_RANK": "0"})
    assert process.wait(120) == (-signal.SIGKILL if kill_after else 0), process.said()
    return outputs / name


def points(folder):
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [point for point in found if "clock/wall(s)" in point]


def ticks(point):
    """Parts of a point in ticks, exactly."""
    return {name: round(point[f"clock/{name}(s)"] * 1e9) // TICK for name in PARTS}


@pytest.fixture(scope="module")
def straight(config):
    return ticked(config, "straight")


@pytest.fixture(scope="module")
def killed(config):
    """A run killed after steps 7 and 11, beyond its checkpoints of steps 4 and 8."""
    for kill_after in (7, 11, 0):
        folder = ticked(config, "killed", kill_after)
    return folder


def test_training_parts_of_a_run_killed_twice_equal_those_of_a_straight_one(straight, killed):
    wanted, found = points(straight), points(killed)
    assert [point["step"] for point in found] == [point["step"] for point in wanted] == [1, 2, 4, 6, 8, 10, 12, 14, 16]
    for point, other in zip(found, wanted, strict=True):
        mine, others = ticks(point), ticks(other)
        assert all(mine[part] == others[part] for part in PARTS if part not in ("start_up", "saving", "other")), point["step"]
        assert point["clock/train(s)"] == other["clock/train(s)"] and point["clock/steps"] == point["step"]
    assert all(ticks(wanted[-1])[part] for part in (*TRAIN_PARTS, "validation", "sampling", "saving", "reports", "other"))
    clocks = [json.loads((folder / "summary.json").read_text())["clock"] for folder in (straight, killed)]
    assert clocks[0]["train_seconds"] == clocks[1]["train_seconds"] and clocks[0]["steps"] == clocks[1]["steps"] == 16
    assert clocks[0]["steps_per_second_train"] == clocks[1]["steps_per_second_train"]
    assert clocks[0]["steps_per_second_wall"] > clocks[1]["steps_per_second_wall"]


def test_the_parts_of_every_record_add_up_to_its_wall(straight, killed):
    for folder in (straight, killed):
        for point in points(folder):
            assert sum(round(point[f"clock/{name}(s)"] * 1e9) for name in PARTS) == round(point["clock/wall(s)"] * 1e9)
        clock = json.loads((folder / "summary.json").read_text())["clock"]
        assert sum(round(clock[name] * 1e9) for name in PARTS) == round(clock["wall_seconds"] * 1e9)
        walls = [point["clock/wall(s)"] for point in points(folder)]
        assert walls == sorted(walls) and walls[-1] < clock["wall_seconds"]


def test_two_sessions_of_real_time_add_up_to_what_was_waited_for_them(config, straight):
    """The clock covers the processes from their start to their summary: little of what is seen from outside is missing.

    `straight` has started the server that processes are forks of: starting it is not part of these sessions.
    """
    seen = 0.0
    for session in range(2):
        started = time.time()
        run = ForkedRun(config, "real", "--sampling.enable", "false")
        if session == 0:
            run.wait_for_step(15)
            run.send(signal.SIGTERM)
        codes, outputs = run.wait()
        seen += (run.folder / "summary.json").stat().st_mtime - started
        assert codes == [143 if session == 0 else 0], outputs
    clock = json.loads((run.folder / "summary.json").read_text())["clock"]
    assert seen - 2.0 < clock["wall_seconds"] < seen + 0.05
    assert clock["repeated"] == 0 and clock["steps"] == 60 and clock["start_up"] > 0
    assert 0 < clock["train_seconds"] < clock["wall_seconds"] - clock["start_up"] - clock["saving"]
    speed = next(line for line in outputs[0].splitlines() if line.startswith("  speed"))
    assert f"{clock['steps_per_second_train']:.4g} steps/s of training alone" in speed
    assert f"{clock['steps_per_second_wall']:.4g} steps/s in all (60 steps" in speed  # of the same reading of the clock
