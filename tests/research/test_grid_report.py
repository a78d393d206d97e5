"""Reports of grids in which runs failed: nothing drops out unseen."""

import math

import pytest

from research import grid_plots
from research.grid_results import GridResults
from research.slot_nodes import timestep_bins
from research.trained_grid_report import write
from torchtitan.diffusion.denoising import DenoisingConfig
from torchtitan.diffusion.objectives import build_objective
from torchtitan.pictures.style import label_log_axis, new_figure
from torchtitan.statistics.interval import Interval

BINS = timestep_bins(build_objective(DenoisingConfig(), 0), 1)[:2]
# ln loss by seed; None: the run failed. Without its hard seed, "lost" has the lowest mean of all.
RUNS = {
    "reference": (1.0, 2.0, 9.0), "better": (0.9, 1.9, 8.901), "lost": (0.95, 1.95, None), "none": (None, None, None),
}  # fmt: skip


def rows() -> list[dict[str, str]]:
    found = []
    for arm, of_seeds in RUNS.items():
        for seed, value in enumerate(of_seeds):
            shared = {"group": "all", "settings": arm, "seed": str(seed), "parametrisation": "v", "images": "8"}
            if value is None:
                empty = dict.fromkeys(("bin", "share", "samples", "weights", "error"), "")
                found.append(shared | empty | {"status": "failed"})
                continue
            for samples in (10, 20):
                error = math.exp(value + 0.1 * (20 - samples))
                found += [
                    shared | {
                        "bin": str(place), "share": "0.1", "samples": str(samples), "step": str(samples // 10),
                        "weights": "none", "error": f"{error:.10g}", "status": "ok",
                    }
                    for place in range(len(BINS))
                ]  # fmt: skip
    return found


def table(text: str, title: str) -> dict[str, list[str]]:
    """Second column -> all columns of the first table below a title."""
    lines = [line for line in text.partition(title)[2].split("\n#")[0].splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    return {row[1]: row for row in cells}


@pytest.fixture
def report(tmp_path):
    def write_report(given: list[dict[str, str]]) -> str:
        results = GridResults(given, [("all", arm) for arm in RUNS], "none")
        return write(results, True, BINS, tmp_path)

    return write_report


def test_lost_seeds_are_said_and_ranks_are_over_shared_seeds(report, tmp_path):
    text = report(rows())
    found = table(text, "### Uniform mean")
    assert list(found) == ["better", "lost", "reference", "none"]
    assert [row[:3] for row in found.values()] == [
        ["1", "better", "3"], ["2", "lost", "2"], ["3", "reference", "3"], ["-", "none", "0"],
    ]  # fmt: skip
    assert found["better"][5] == "lower" and found["better"][6] == "none"
    assert found["lost"][5:7] == ["2 of 3 seeds; 1 failed", "-"] and found["none"][3:6] == [
        "-", "-", "0 of 3 seeds; 3 failed",
    ]  # fmt: skip
    # Geometric means over the seeds 0 and 1.
    assert float(found["reference"][3]) == pytest.approx(math.exp(1.5), rel=1e-4)
    assert found["lost"][7].endswith("failed") and found["none"][7] == "failed"
    assert "for these 8 images" in text
    changes = text.partition("### By timestep")[2]
    assert "**-9." in changes and "**-4.88" not in changes and "-4.88 %" in changes
    assert (tmp_path / "bins_1.png").is_file() and (tmp_path / "curves.png").is_file()


@pytest.fixture
def no_pictures(monkeypatch):
    monkeypatch.setattr(grid_plots, "draw_bins", lambda *of: "")
    monkeypatch.setattr(grid_plots, "draw_curves", lambda *of: "")


def test_a_reference_that_lost_seeds_leaves_no_verdicts(report, no_pictures):
    given = [row for row in rows() if row["settings"] != "reference" or row["seed"] == "0"]
    found = table(report(given), "### Uniform mean")
    assert found["better"][5] == "reference: 1 of 3 seeds; 2 failed"


def test_a_bin_that_no_run_has_is_missed(report, no_pictures):
    given = [row | ({"status": "failed", "error": ""} if row["bin"] == "1" else {}) for row in rows()]
    assert {row[3] for row in table(report(given), "### Uniform mean").values()} == {"-"}


def test_a_run_whose_batch_has_grown_has_a_line_between_its_checkpoints():
    def row(arm: str, samples: int, step: int, error: float) -> dict[str, str]:
        return {
            "group": "all", "settings": arm, "seed": "0", "parametrisation": "v", "images": "8", "bin": "0", "share": "1",
            "weights": "none", "samples": str(samples), "step": str(step), "error": str(error),
            "status": "ok" if error else "failed",
        }  # fmt: skip

    given = [row("plain", 10, 1, 8.0), row("plain", 20, 2, 0.0), row("plain", 40, 4, 2.0)]
    given += [row("grown", 10, 1, 8.0), row("grown", 40, 3, 2.0)]
    results = GridResults(given, [("all", "plain"), ("all", "grown")], "none", [5, 10, 20, 40])
    found = {arm: [results.errors("all", arm, 0, samples) for samples in results.samples] for arm in ("plain", "grown")}
    assert found["plain"] == [[], [8.0], [], [2.0]]  # what failed is missing
    assert found["grown"] == [[], [8.0], [pytest.approx(4.0)], [2.0]]  # error x samples is constant: a line in logarithms
    assert (results.steps("all", "plain"), results.steps("all", "grown")) == ({0: 4}, {0: 3})


def test_a_target_reached_before_the_first_point_of_a_batch_that_grew_early_is_said_so(tmp_path, no_pictures):
    """Checkpoints at 25 and 40 samples only: known at the planned 40, and at the target of 2 there; none at 10 and 20."""
    shared = {"group": "all", "seed": "0", "parametrisation": "v", "images": "8", "share": "1", "weights": "none", "status": "ok"}
    losses = {"plain": {10: 8.0, 20: 6.0, 40: 2.0}, "grown": {25: 1.0, 40: 0.5}}
    given = [
        shared | {"settings": arm, "bin": str(place), "samples": str(n), "step": str(n // 10), "error": str(error)}
        for arm, curve in losses.items() for n, error in curve.items() for place in range(len(BINS))
    ]  # fmt: skip
    results = GridResults(given, [("all", arm) for arm in losses], "none", [10, 20, 40])
    assert table(write(results, True, BINS, tmp_path), "### Uniform mean")["grown"][7] == "before 40"


@pytest.mark.parametrize("ends", [(1.1301, 1.1312), (1.1283, 1.251)])
def test_labels_of_a_narrow_axis_differ_and_are_the_ticks(ends):
    figure, axes = new_figure("narrow", rows=1, size=(4, 3))
    ax = axes[0, 0]
    ax.plot([0, 1], ends)
    ax.set_yscale("log")
    label_log_axis(ax.yaxis)
    figure.canvas.draw()
    low, high = ax.get_ylim()
    ticks = [tick for tick in ax.get_yticks() if low <= tick <= high]
    labels = [ax.yaxis.get_major_formatter()(tick) for tick in ticks]
    assert len(labels) > 2 and len(set(labels)) == len(labels)
    # A tick is a number times the step plus an offset, the label that number itself: three roundings of 2^-53.
    assert [float(label) for label in labels] == pytest.approx(ticks, rel=3 * 2.0**-53)


def test_a_mean_without_an_interval_is_hollow():
    _, axes = new_figure("hollow", rows=1, size=(4, 3))
    known = Interval(0.0, -0.1, 0.1)
    grid_plots._draw_line(axes[0, 0], [1, 2, 3], [known, Interval(0.0), known], label="a", color="k")
    filled, hollow = axes[0, 0].get_lines()
    assert (filled.get_fillstyle(), filled.get_markevery()) == ("full", [0, 2])
    assert (hollow.get_fillstyle(), hollow.get_markevery()) == ("none", [1])
