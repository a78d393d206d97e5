"""Noise scales of checkpoints beside the logged ones: which bins they are compared in, and the tables' ratios."""

import argparse
import json
from pathlib import Path

import pytest
import torch

from torchtitan.config.job import load_config
from torchtitan.training.metrics import METRICS_FILE
from torchtitan_dit.studies.frame import StudyRun
from torchtitan_dit.studies.gns_trajectory import against_trajectory

DIGITS = Path(__file__).resolve().parents[2] / "train_configs" / "digits.toml"
PREFIX = "gns/plain/composite"


def run_of(folder, **settings) -> StudyRun:
    overrides = {"gns.enable": "true", "gns.single_pass": "true", **settings}
    options = [text for name, value in overrides.items() for text in (f"--{name}", value)]
    config = load_config(["--job.config_file", str(DIGITS), *options], world_size=1)
    return StudyRun(folder, config, [2], "none", argparse.Namespace(), torch.device("cpu"))


def row(low: float, high: float, value: float) -> dict[str, str]:
    return {
        "estimator": "correct", "status": "ok", "model": "step-2", "unbounded": "False", "bin_unit": "t",
        "t_min": str(low), "t_max": str(high), "gns_est": str(value), "lower": str(value / 2), "upper": str(value * 2),
    }  # fmt: skip


def log(folder, bins: int, step: int, value: float) -> None:
    point: dict[str, float] = {"step": step}
    for k in range(bins):
        point |= {f"{PREFIX}/{k}/b_simple": value * (k + 1), f"{PREFIX}/{k}/lower": value, f"{PREFIX}/{k}/upper": 4 * value}
    with open(folder / METRICS_FILE, "a") as file:
        file.write(json.dumps(point) + "\n")


def test_the_bins_of_a_run_that_gives_their_edges_are_counted_by_them(tmp_path):
    run = run_of(tmp_path, **{"gns.bin_edges": "[0, 0.25, 0.6, 1]"})  # three bins; gns.num_bins keeps its default of ten
    log(tmp_path, 3, 1, 99.0)
    log(tmp_path, 3, 2, 10.0)
    log(tmp_path, 3, 3, 77.0)
    rows = [row(0.0, 0.25, 5.0), row(0.25, 0.6, 10.0), row(0.6, 1.0, 60.0)]
    text = against_trajectory(run, rows, tmp_path / "picture.png")
    ratios = [line.split("|")[-2].strip() for line in text.splitlines() if line.startswith("| 2")]
    assert ratios == ["0.50", "0.50", "2.00"]  # of the point logged at step 2: 10, 20, 30
    assert list(tmp_path.glob("picture*"))


@pytest.mark.parametrize("rows", [
    [row(0.0, 0.25, 5.0), row(0.25, 1.0, 60.0)],
    [row(0.0, 0.3, 5.0), row(0.3, 0.6, 10.0), row(0.6, 1.0, 60.0)],
])  # fmt: skip
def test_other_bins_than_the_logged_ones_are_not_compared(tmp_path, rows):
    run = run_of(tmp_path, **{"gns.bin_edges": "[0, 0.25, 0.6, 1]"})
    log(tmp_path, 3, 2, 10.0)
    assert against_trajectory(run, rows, tmp_path / "picture.png") == ""
