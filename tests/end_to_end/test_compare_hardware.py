"""scripts/compare_hardware.py on small run folders written by hand; its numbers are worked out anew from metrics.jsonl."""

import itertools
import json
import math
import shutil
import statistics
from pathlib import Path

import pytest
from PIL import Image

from tests.end_to_end.test_compare import Page
from tests.forked import run_script
from torchtitan.runs.hardware import published
from torchtitan.runs.hardware.clocked_runs import by_hardware, read_clocked_runs
from torchtitan.runs.hardware.rates import speed_up, steps_per_second
from torchtitan.training.clock import PARTS

CONFIG = """
[job]
name = "{name}"
[objective]
timesteps.name = "uniform"
[training]
steps = 100
global_batch_size = 16
local_batch_size = {local}
[metrics]
loss_bins = 2
[debug]
seed = {seed}
"""
T_9 = 2.2621571628  # Student's t of 95 %, 9 degrees of freedom, from tables


def write_run(folder: Path, threads: int, scale: float, seed: int = 0, local: int = 16) -> Path:
    (folder / "samples").mkdir(parents=True)
    (folder / "config.toml").write_text(CONFIG.format(name=folder.name, seed=seed, local=local))
    points, train, wall = [], 0.0, 3.0
    for step in range(0, 101, 10):
        train += scale * (1.0 + 0.05 * (step * 7 % 11) / 11 + 0.01 * seed)
        wall += scale * (1.2 + 0.3 * (step % 30 == 0))
        points.append({"step": step + 1, "clock/train(s)": train, "clock/wall(s)": wall + train, "clock/steps": step + 1,
                       "loss_by_bin/0": 2.0 / (1 + step), "loss_by_bin/1": 1.0 / (1 + step)})  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(point) + "\n" for point in points))
    Image.new("RGB", (20, 10), (threads, 0, 0)).save(folder / "samples" / "step-00000100.png")
    clock = dict.fromkeys(PARTS, 0.0) | {"forward": train, "other": wall}
    clock |= {"train_seconds": train, "wall_seconds": wall + train, "steps": 101, "cost": 2.0, "currency": "EUR"}
    hardware = {"device": f"CPU, {threads} threads", "num_devices": 1, "threads": threads, "torch": "2"}
    (folder / "summary.json").write_text(json.dumps({
        "status": "completed", "step": 101, "layout": "one process", "clock": clock, "hardware": hardware,
    }))  # fmt: skip
    return folder


def call(*words: object):
    return run_script("scripts/compare_hardware.py", *map(str, words))


def window_seconds(folder: Path, tag: str) -> list[float]:
    totals = [json.loads(line)[tag] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [later - earlier for earlier, later in itertools.pairwise(totals)]


@pytest.fixture
def runs(tmp_path):
    return [write_run(tmp_path / "one", 1, 2.0), write_run(tmp_path / "two", 2, 1.25)]


def test_rates_are_those_of_metrics_jsonl(runs):
    for group, folder in zip(by_hardware(read_clocked_runs(runs)), runs, strict=True):
        for clock in ("train", "wall"):
            per_step = [value / 10 for value in window_seconds(folder, f"clock/{clock}(s)")]
            mean, half = statistics.fmean(per_step), T_9 * statistics.stdev(per_step) / math.sqrt(10)
            found = steps_per_second(group, clock).interval
            # Windows of equal steps: Fieller's interval is the reciprocal of Student's for the seconds per step.
            assert found.value == pytest.approx(1 / mean)
            assert (found.lower, found.upper) == pytest.approx((1 / (mean + half), 1 / (mean - half)), rel=1e-6)


def test_speed_up_of_proportional_windows_is_exact(runs):
    one, two = by_hardware(read_clocked_runs(runs))
    found = speed_up(one, two, "train").interval
    assert (found.value, found.lower, found.upper) == pytest.approx((1.6, 1.6, 1.6), rel=1e-6)


def test_runs_of_equal_seeds_are_pairs(tmp_path):
    runs = [write_run(tmp_path / f"{n}-{seed}", n, 2.0 / n * (1 + 0.02 * seed * n), seed) for n in (1, 2) for seed in range(3)]
    one, two = by_hardware(read_clocked_runs(runs))
    assert (len(one.runs), len(two.runs)) == (3, 3)
    totals = [sum(window_seconds(folder, "clock/train(s)")) for folder in runs]
    logs = [math.log(totals[seed] / totals[3 + seed]) for seed in range(3)]
    half = 4.3026527297 * statistics.stdev(logs) / math.sqrt(3)
    found = speed_up(one, two, "train")
    assert found.basis == "3 pairs of runs"
    ends = [math.exp(statistics.fmean(logs) + sign * half) for sign in (-1, 1)]
    assert [found.interval.lower, found.interval.upper] == pytest.approx(ends, rel=1e-6)


def test_page_and_markdown(runs, tmp_path):
    output = tmp_path / "page.html"
    for _ in range(2):  # its own files are replaced
        result = call(*runs, "--published", "--output", output)
        assert result.returncode == 0, result.stderr
    page, text = Page(output), (tmp_path / "page.md").read_text()
    page.assert_needs_no_network()
    rate = 100 / sum(window_seconds(runs[0], "clock/train(s)"))
    assert any(cell.startswith(f"{rate:.3f} (") for cell in page.cells) and f"{rate:.3f} (" in text
    for word in ("published: A100, 500 steps", "1.7216", "1.7221", "gaps of 36 h", "48 GB", "2.000 EUR"):
        assert word in page.text and word in text, word
    assert len([one for one in page.values("img", "src") if one]) == 2
    (tmp_path / "page.md").write_text("mine")
    refused = call(*runs, "--output", output)
    assert refused.returncode == 2 and (tmp_path / "page.md").read_text() == "mine"


def test_published_rates():
    rates = [round(one.steps_per_second, 4) for one in published.TIMES]
    assert rates == [0.4936, 0.2867, 0.3820, 0.2218]
    assert {steps: round(ratio, 4) for steps, ratio in published.speed_ups().items()} == {500: 1.7216, 2000: 1.7221}


def _edit(folder: Path, **values) -> None:
    path = folder / "summary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize(("damage", "words"), [
    (lambda one, two: shutil.copytree(two, one, dirs_exist_ok=True) and write_run(one / "x", 1, 1.0, local=8).rename(
        two.with_name("three")) and shutil.copy(two.with_name("three") / "config.toml", one),
     ("training.local_batch_size", "differ in settings")),
    (lambda one, two: _edit(one, status="running"), ("running", "complete the run")),
    (lambda one, two: (one / "summary.json").unlink(), ("no summary", "complete the run")),
    (lambda one, two: _edit(one, clock={}), ("has no clock", "train it again")),
    (lambda one, two: (one / "metrics.jsonl").write_text("{"), ("has no clock",)),
    (lambda one, two: (one / "config.toml").unlink(), ("no config.toml",)),
])  # fmt: skip
def test_unsuitable_runs_are_refused_in_one_line(runs, tmp_path, damage, words):
    damage(*runs)
    result = call(*runs, "--output", tmp_path / "page.html")
    assert result.returncode == 2 and len(result.stderr.splitlines()) == 1, result.stderr
    assert all(word in result.stderr for word in words) and not (tmp_path / "page.html").exists(), result.stderr


def test_a_run_given_twice_and_no_run_are_refused(runs):
    for words in ([runs[0], runs[0]], []):
        result = call(*words)
        assert result.returncode == 2 and len(result.stderr.splitlines()) == 1, result.stderr


def test_damaged_lines_and_missing_samples_are_left_out(runs, tmp_path):
    shutil.rmtree(runs[0] / "samples")
    with open(runs[0] / "metrics.jsonl", "a") as file:
        file.write('{"step": 111, "clo')
    (runs[1] / "inference.json").write_text("{}")
    result = call(*runs, "--output", tmp_path / "page.html")
    assert result.returncode == 0, result.stderr
    assert "1 line of metrics.jsonl" in result.stdout and "inference.json" in result.stdout
