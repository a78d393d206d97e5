"""The clock of runs that are killed, stopped and rolled back: training counts once, and no recorded second is lost."""

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
    "--metrics.price_per_hour", "7.2", "--metrics.currency", "EUR",
)  # fmt: skip


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = tmp_path_factory.mktemp("clock") / "small.toml"
    path.write_text(CONFIG + MORE)
    return path


def ticked(config, name, kill_after=0):
    """Train by the ticking clock; the run's folder."""
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


def saved_clock(folder, step):
    state = json.loads((folder / "checkpoint" / f"step-{step:08d}" / "state.json").read_text())
    return state["reports"]["clock"]


@pytest.fixture(scope="module")
def straight(config):
    return ticked(config, "straight")


@pytest.fixture(scope="module")
def killed(config):
    """A run killed after steps 7 and 11, beyond its checkpoints of steps 4 and 8; and what each kill left."""
    left = []
    for kill_after, step in ((7, 4), (11, 8)):
        folder = ticked(config, "killed", kill_after)
        left.append((saved_clock(folder, step), points(folder)[-1]))
    return ticked(config, "killed"), left


def test_training_parts_of_a_run_killed_twice_equal_those_of_a_straight_one(straight, killed):
    wanted, found = points(straight), points(killed[0])
    assert [point["step"] for point in found] == [point["step"] for point in wanted] == [1, 2, 4, 6, 8, 10, 12, 14, 16]
    for point, other in zip(found, wanted, strict=True):
        mine, others = ticks(point), ticks(other)
        assert all(mine[part] == others[part] for part in PARTS if part not in ("start_up", "repeated")), point["step"]
        assert point["clock/train(s)"] == other["clock/train(s)"] and point["clock/steps"] == point["step"]
    assert all(ticks(wanted[-1])[part] for part in (*TRAIN_PARTS, "validation", "sampling", "saving", "reports", "other"))
    clocks = [json.loads((folder / "summary.json").read_text())["clock"] for folder in (straight, killed[0])]
    assert clocks[0]["train_seconds"] == clocks[1]["train_seconds"] and clocks[0]["steps"] == clocks[1]["steps"] == 16
    assert clocks[0]["steps_per_second_train"] == clocks[1]["steps_per_second_train"]
    assert clocks[0]["steps_per_second_wall"] > clocks[1]["steps_per_second_wall"]


def test_lost_attempts_are_repeated_time_to_the_tick(straight, killed):
    """Of each: what the last point before the kill had beyond the checkpoint, without saves and starts."""
    folder, left = killed
    lost = 0
    for clock, last in left:
        saved = {name: ns // TICK for name, ns in clock["parts_ns"].items()}
        lost += sum(count - saved[name] for name, count in ticks(last).items() if name not in ("start_up", "saving", "repeated"))
    assert lost > 20 and ticks(points(folder)[-1])["repeated"] == lost
    assert ticks(points(straight)[-1])["repeated"] == 0


def test_the_parts_of_every_record_add_up_to_its_wall(straight, killed):
    for folder in (straight, killed[0]):
        for point in points(folder):
            assert sum(round(point[f"clock/{name}(s)"] * 1e9) for name in PARTS) == round(point["clock/wall(s)"] * 1e9)
        clock = json.loads((folder / "summary.json").read_text())["clock"]
        assert sum(round(clock[name] * 1e9) for name in PARTS) == round(clock["wall_seconds"] * 1e9)
        walls = [point["clock/wall(s)"] for point in points(folder)]
        assert walls == sorted(walls) and walls[-1] < clock["wall_seconds"]


def test_energy_goes_on_through_resumes_and_counts_what_was_lost(straight, killed):
    """A joule per measurement: of points 1, 2, 4 ... 16, and of the end; twice those of steps 6 and 10."""
    energies = [json.loads((folder / "summary.json").read_text())["clock"]["energy_joules"] for folder in (straight, killed[0])]
    assert energies == [9 + 1, 9 + 1 + 2]
    assert [point["clock/energy(J)"] for point in points(straight)] == list(range(1, 10))


def test_cost_is_the_wall_times_the_price(killed):
    clock = json.loads((killed[0] / "summary.json").read_text())["clock"]
    assert clock["cost"] == pytest.approx(clock["wall_seconds"] * 0.002) and clock["currency"] == "EUR"
    assert clock["cost_per_step_wall"] == pytest.approx(clock["cost"] / 16)
    assert clock["cost_per_step_train"] == pytest.approx(clock["train_seconds"] * 0.002 / 16)


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


def test_a_price_without_sense_is_refused(config):
    for word in ("--metrics.price_per_hour", "0"), ("--metrics.currency", "EUR"):
        run = ForkedRun(config, "refused", *word)
        codes, outputs = run.wait()
        assert codes == [2] and word[0].removeprefix("--") in outputs[0] and "Traceback" not in outputs[0]
