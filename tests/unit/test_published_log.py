"""A run's loss beside a published log: one that follows the same curve, and one that is off by 5 %."""

import json
import math
import random
import statistics
from pathlib import Path

import pytest

from torchtitan.runs.compare.published_log import against_log, read_log
from torchtitan.runs.record import RunRecordError, read_run
from torchtitan_dit.commands.compare import main

STEPS = (100, 200, 1_000, 2_000, 3_000)


def curve(step: float) -> float:
    return 0.34 + 2.0 * math.exp(-step / 60) + 0.06 * math.exp(-step / 700)


def mean_of_hundred(step: int) -> float:
    return sum(map(curve, range(step - 99, step + 1))) / 100


@pytest.fixture
def run_folder(tmp_path) -> Path:
    folder, draw = tmp_path / "run", random.Random(1)
    folder.mkdir()
    points = [
        {"step": step, "loss_metrics/global_avg_loss": sum(map(curve, range(step - 9, step + 1))) / 10 + draw.gauss(0, 0.003)}
        for step in range(10, 3_001, 10)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(point) + "\n" for point in points))
    return folder


def write_log(path: Path, factor: float, line: str) -> Path:
    path.write_text("".join(line.format(step=step, loss=factor * mean_of_hundred(step)) + "\n" for step in STEPS))
    return path


@pytest.mark.parametrize(
    "line", [
        "[2025-01-01] (step={step:07d}) Train Loss: {loss:.4f}, Train Steps/Sec: 1.2", "step {step} loss {loss:.4f}",
        "\x1b[31mstep: {step:>2}  \x1b[32mloss: {loss:8.5f}  \x1b[38;2;180;60;0mgrad_norm:  0.9",
        "step {step:>6}/3000  loss {loss:.4f}  grad_norm 0.381  56.8 img/s  ETA 0:00:22",
    ],
)  # fmt: skip
def test_the_same_curve_is_inside_the_band_and_one_off_by_five_percent_is_not(run_folder, tmp_path, capsys, line):
    run = read_run(run_folder)
    points = against_log(run, read_log(write_log(tmp_path / "same.txt", 1.0, line)))
    assert [point.step for point in points] == list(STEPS) and all(point.inside for point in points)
    assert points[-1].mean == pytest.approx(mean_of_hundred(3_000), abs=0.003)
    assert points[-1].half_width == pytest.approx(3 * 0.003 / math.sqrt(10), rel=0.8)
    off = against_log(run, read_log(write_log(tmp_path / "off.txt", 1.05, line)))
    assert [point.inside for point in off[2:]] == [False] * 3
    assert main([str(run_folder), "--log", str(tmp_path / "off.txt")]) == 0
    assert "OUTSIDE" in capsys.readouterr().out


def test_a_text_without_losses_and_a_run_that_logs_too_rarely_are_refused(run_folder, tmp_path):
    text = tmp_path / "notes.txt"
    text.write_text("no numbers here\n")
    with pytest.raises(RunRecordError, match="no line has a step and a loss"):
        read_log(text)
    with pytest.raises(RunRecordError, match="two logged losses within the 5 steps"):
        against_log(read_run(run_folder), {5: 1.0, 10: 0.9})
    with pytest.raises(RunRecordError, match="has the loss of each step"):
        against_log(read_run(run_folder), dict.fromkeys(range(1, 9), 1.0))


def test_points_count_by_their_steps_and_further_terms_are_left_out(tmp_path, capsys):
    points = [(1, 2.0), (10, 1.0), (15, 1.5), (20, 1.1), (30, 1.0)]
    names = ("step", "loss_metrics/global_avg_weighted_error", "loss_metrics/global_avg_loss")
    lines = (json.dumps(dict(zip(names, (*point, 9.0), strict=True))) + "\n" for point in points)
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    log = {1: 2.1, 10: 1.1, 20: 1.3, 30: 1.0, 40: 0.9}
    first, second = against_log(read_run(tmp_path), log)
    assert (first.mean, second.mean) == pytest.approx((1.1, 1.3))  # (1 x 2 + 9 x 1) / 10, and of five steps each
    assert first.half_width == pytest.approx(3 * math.sqrt((0.9**2 + 9 * 0.1**2) / 10))
    assert second.half_width == pytest.approx(3 * statistics.stdev([1.5, 1.1]) / math.sqrt(2))
    (tmp_path / "log.txt").write_text("".join(f"step={step} loss={loss}\n" for step, loss in log.items()))
    assert main([str(tmp_path), "--log", str(tmp_path / "log.txt")]) == 0
    said = capsys.readouterr().out.splitlines()[-1]
    assert said.startswith("2 of 2 within the band of 3 standard errors; 2 of the log's steps left out, without two logged")
