"""Noise scales of checkpoints beside the logged ones: which bins they are compared in, and the tables' ratios."""

import argparse
import itertools
import json
from pathlib import Path

import pytest
import torch

from research import gns_plots, gns_trajectory
from research.frame import StudyRun
from research.gns_trajectory import against_trajectory
from research.pictures import save
from torchtitan.config.job import load_config
from torchtitan.diffusion.objectives import build_objective
from torchtitan.gns.config import bin_tags
from torchtitan.pictures.style import new_figure
from torchtitan.training.metrics import METRICS_FILE

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


def log(folder, bins: int, step: int, value: float, edges: list[float] | None = None) -> None:
    point: dict[str, float] = {"step": step} | ({} if edges is None else bin_tags(edges))
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


def test_points_of_the_bins_before_a_resume_with_others_are_not_compared(tmp_path):
    run = run_of(tmp_path, **{"gns.bin_edges": "[0, 0.25, 0.6, 1]"})
    rows = [row(0.0, 0.25, 5.0), row(0.25, 0.6, 10.0), row(0.6, 1.0, 60.0)]
    log(tmp_path, 3, 1, 10.0, [0.3, 0.6])
    log(tmp_path, 4, 2, 10.0, [0.25, 0.6, 0.8])
    assert against_trajectory(run, rows, tmp_path / "picture.png") == ""
    (tmp_path / METRICS_FILE).unlink()
    log(tmp_path, 3, 2, 10.0, [0.25, 0.6])
    assert "| 2 |" in against_trajectory(run, rows, tmp_path / "picture.png")


@pytest.mark.parametrize("rows", [
    [row(0.0, 0.25, 5.0), row(0.25, 1.0, 60.0)],
    [row(0.0, 0.3, 5.0), row(0.3, 0.6, 10.0), row(0.6, 1.0, 60.0)],
])  # fmt: skip
def test_other_bins_than_the_logged_ones_are_not_compared(tmp_path, rows):
    run = run_of(tmp_path, **{"gns.bin_edges": "[0, 0.25, 0.6, 1]"})
    log(tmp_path, 3, 2, 10.0)
    assert against_trajectory(run, rows, tmp_path / "picture.png") == ""


@pytest.mark.parametrize("path", ["ddpm_linear", "ddpm_cosine"])
@pytest.mark.parametrize("shift", [0.0, -0.5, 0.5])
def test_edges_between_the_same_indices_are_those_of_the_same_bins(tmp_path, path, shift):
    run = run_of(tmp_path, **{"objective.path": path, "objective.prediction": "noise", "objective.preconditioning": "index",
                              "objective.timesteps.name": "uniform", "gns.num_bins": "4"})  # fmt: skip
    index_to_t = build_objective(run.config.objective, 0).path.index_to_t
    inner = [index_to_t(torch.tensor(250.0 * k + shift)).item() for k in (1, 2, 3)]
    rows = [row(low, high, 5.0) for low, high in itertools.pairwise([0.0, *inner, 1.0])]
    assert gns_trajectory.same_bins(run, rows) == (shift <= 0)


@pytest.mark.filterwarnings("error")
def test_the_picture_has_a_place_for_every_bin_where_no_value_has_an_upper_end(tmp_path, monkeypatch):
    run = run_of(tmp_path, **{"gns.bin_edges": "[0, 0.25, 0.6, 1]"})
    point = {"step": 2} | {f"{PREFIX}/{k}/{name}": 10.0 for k in range(3) for name in ("b_simple", "lower")}
    (tmp_path / METRICS_FILE).write_text(json.dumps(point) + "\n")
    rows = [row(*ends, 5.0) | {"unbounded": "True"} for ends in ((0.0, 0.25), (0.25, 0.6), (0.6, 1.0))]
    figures = []
    monkeypatch.setattr(gns_trajectory, "save", lambda figure, path: figures.append(figure) or "")
    assert "> 2.5" in against_trajectory(run, rows, tmp_path / "picture.png")
    left, right = figures[0].axes[0].get_xlim()
    assert left < 0 and right > 2


@pytest.mark.filterwarnings("error")
def test_bars_without_an_upper_end_are_drawn_on_a_logarithmic_scale(tmp_path):
    rows = [row(0.0, 0.5, 5.0) | {"unbounded": "True"}, row(0.5, 1.0, 9.0) | {"unbounded": "True"}]
    figure, axes = new_figure("bars", 1, 1, (4, 3))
    gns_plots.draw_bars(axes[0, 0], rows, ["C0", "C1"])
    gns_plots.set_scale(axes[0, 0], rows, "log", along="x")
    low, high = axes[0, 0].get_xlim()
    assert 0 < low < 2.5 and high > 4.5
    save(figure, tmp_path / "bars.png")


@pytest.mark.parametrize("scale", ["linear", "log"])
def test_an_interval_without_an_end_is_within_the_picture(scale):
    bounded = {"status": "ok", "unbounded": "False", "gns_est": "20", "lower": "15", "upper": "30"}
    unbounded = bounded | {"unbounded": "True"}
    figure, axes = new_figure("title")
    axes[0, 0].set_xscale(scale)
    gns_plots.draw_line(axes[0, 0], [600, 700, 900], [bounded, unbounded, unbounded], "C0", "a bin")
    figure.draw_without_rendering()
    left, right = axes[0, 0].get_xlim()
    assert 500 < left < 600 and 900 < right < 1000
