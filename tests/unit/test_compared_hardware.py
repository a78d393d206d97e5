"""Hardware and number of devices compared by runs of one configuration, against numbers worked out by hand."""

import math
import statistics
from pathlib import Path

import pytest

from torchtitan.runs.compare.hardware import by_hardware, compared_hardware, one_machine, speed_up
from torchtitan.runs.compare.page import compare_page
from torchtitan.runs.record import RunRecord, hardware_name
from torchtitan.training.metric_points import timed_since

T_2 = 4.3026527297  # Student's t of 95 %, 2 degrees of freedom, from tables


def run_on(device: str, rate: float, seed: int = 0, count: int = 8, lr: float = 1e-3) -> RunRecord:
    """Run whose last half of the points has that rate, after a slow start."""
    points = [
        {"step": step, "throughput(img/s)": rate if step > 5 else rate / 9, "time_metrics/end_to_end(s)": 64 / rate,
         "loss_metrics/global_avg_loss": 0.5 + seed, "validation_metrics/loss": 0.25}
        for step in range(1, 11)
    ]  # fmt: skip
    summary = {
        "status": "completed", "step": 10, "hardware": {"device": device, "num_devices": count, "cpu": "A CPU"},
        "clock": {"train_seconds": 640 / rate}, "seconds_per_picture": 1 / rate,
    }  # fmt: skip
    config = {"debug": {"seed": seed}, "optimizer": {"lr": lr}, "parallelism": {"data_parallel_replicate_degree": count}}
    return RunRecord(Path(f"{device}-{seed}"), f"{device}-{seed}", config, summary, points)


def test_a_row_has_the_rates_the_speed_up_and_the_loss_of_its_hardware():
    (columns, rows), note = compared_hardware([run_on("A40", 160.0), run_on("A100", 320.0, count=4)])
    assert columns[0] == "hardware" and [row[0] for row in rows] == ["8 x A40", "4 x A100"]
    first, second = (dict(zip(columns, row, strict=True)) for row in rows)
    assert (first["s/step"], first["images/s"], first["speed-up"]) == ("0.4000", "160.0", "1 (reference)")
    assert (second["s/step"], second["images/s"], second["speed-up"]) == ("0.2000", "320.0", "2.000")
    assert (second["training alone, s"], second["s a picture"]) == ("2.000", "0.003125")
    assert (second["training loss"], second["held-out loss"]) == ("0.5000", "0.2500")
    assert "differ in" not in note and "was resumed" not in note


def test_a_run_that_changed_its_layout_has_no_seconds_of_training_and_is_named():
    changed = run_on("A40", 160.0)
    changed.summary["timed"] = {"as": "one process", "after_step": 6}
    (columns, rows), note = compared_hardware([changed, run_on("A100", 320.0)])
    seconds = [dict(zip(columns, row, strict=True))["training alone, s"] for row in rows]
    assert seconds == ["–", "2.000"] and f" A40-0 {timed_since(6)}." in note and "after step 6: its speeds" in note


def test_a_run_that_has_not_ended_has_speeds_alone_and_one_of_unknown_hardware_is_named():
    stopped, running = run_on("A100", 320.0), run_on("A40", 160.0, seed=1)
    stopped.summary["status"], running.summary = "interrupted", None
    (columns, rows), note = compared_hardware([run_on("A40", 160.0), stopped, running])
    _, found = (dict(zip(columns, row, strict=True)) for row in rows)
    assert found["images/s"] == "320.0"
    assert found["training alone, s"] == found["training loss"] == found["held-out loss"] == "–"
    assert "A100-0 has not reached its last step:" in note and "A40-1 is left out:" in note
    assert one_machine([run_on("A40", 160.0)]) and not one_machine([run_on("A40", 160.0), running])


def test_the_page_has_the_table_of_two_kinds_of_hardware():
    first, second = run_on("A40", 160.0), run_on("A100", 320.0)
    assert all(text in compare_page([first, second]) for text in ("devices compared", "8 x A100", "Speed-up: images/s over"))
    assert "devices compared" not in compare_page([first])


def test_speed_up_of_equal_seeds_is_the_mean_of_their_ratios():
    ratios = [1.5, 1.6, 1.8]
    runs = [run_on("A40", 100.0 + seed, seed) for seed in range(3)]
    runs += [run_on("A100", ratio * (100.0 + seed), seed) for seed, ratio in enumerate(ratios)]
    found = speed_up(*by_hardware(runs))
    logs = [math.log(ratio) for ratio in ratios]
    half = T_2 * statistics.stdev(logs) / math.sqrt(3)
    ends = [math.exp(statistics.fmean(logs) + sign * half) for sign in (0, -1, 1)]
    assert [found.value, found.lower, found.upper] == pytest.approx(ends, rel=1e-6)


def test_other_settings_that_differ_are_named_and_hardware_s_own_are_not():
    _, note = compared_hardware([run_on("A40", 100.0), run_on("A100", 200.0, count=2, lr=1e-4)])
    assert "The runs also differ in optimizer.lr:" in note


def test_runs_of_one_hardware_are_pooled_over_seeds_and_not_over_settings_or_layouts():
    runs = [run_on("A40", 100.0, seed, lr=lr) for lr, seed in ((1e-3, 0), (1e-4, 0), (1e-3, 1))]
    other = run_on("A40", 100.0, 2)
    other.config["parallelism"] = {"data_parallel_shard_degree": 8}
    (_, rows), _ = compared_hardware([*runs, other, run_on("A100", 200.0)])
    assert [row[1] for row in rows] == ["A40-0, A40-1", "A40-0", "A40-2", "A100-0"]


def test_runs_of_one_hardware_or_without_a_summary_are_not_compared():
    runs = [run_on("A40", 100.0), run_on("A40", 110.0, seed=1)]
    assert compared_hardware(runs) is None
    unknown = RunRecord(Path("killed"), "killed")
    assert hardware_name(unknown) is None and compared_hardware([*runs, unknown]) is None
    assert hardware_name(run_on("CPU x86_64, 2 threads", 1.0, count=1)) == "A CPU, CPU x86_64, 2 threads"
