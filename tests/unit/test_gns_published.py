"""The published estimator shows its bias, the right one the truth, and the correction undoes the published errors."""

import argparse
import csv
import math
from statistics import median

import pytest
import torch

from torchtitan.evaluation.offline_gradients import EstimateFailed, GroupNorms, noise_scale, sub_batch_sizes
from torchtitan.experiments.folder import StudyError
from torchtitan_dit.studies import gns_published
from torchtitan_dit.studies.published_estimator import (
    COLUMNS,
    Cell,
    PublishedRow,
    TableError,
    corrected,
    corrected_table,
    effective_size,
    p1_shares,
    published_estimate,
    read_tables,
    reported_table,
    softmax_shares,
)
from torchtitan_dit.studies.synthetic import SyntheticGradients

PROBLEM = SyntheticGradients()


def test_effective_size_is_the_variance_of_an_equally_weighted_mean():
    for batch in (1, 32, 50, 100, 500, 5000):
        sizes = sub_batch_sizes(batch)
        assert sum(sizes) == batch and max(sizes) <= 32
        variance = sum((1 / len(sizes)) ** 2 / size for size in sizes)
        assert effective_size(batch) == pytest.approx(1 / variance, rel=1e-12)
    assert effective_size(100) == pytest.approx(46.545, abs=1e-3)
    assert effective_size(96) == pytest.approx(96)


@pytest.mark.parametrize(
    ("b", "big_b", "published"), [(50, 500, 147), (50, 5000, 12.4), (100, 1000, 359), (100, 10000, 24.9)]
)
def test_published_formula_has_its_published_bias(b, big_b, published):
    generator = torch.Generator().manual_seed(b * big_b)
    draws = []
    for _ in range(2000):
        try:
            signal, noise = PROBLEM.published(b, big_b, 2, generator)
        except EstimateFailed:
            continue  # as published: no row
        draws.append(noise / signal)
    assert len(draws) > 1900
    assert median(draws) == pytest.approx(published, rel=0.1)


def test_right_estimator_has_the_truth_within_its_interval():
    """200 estimates of the problem in 16 blocks of 320 samples: covered 95 % of the time, and without bias."""
    generator = torch.Generator().manual_seed(3)
    covered, estimates = 0, []
    sizes = torch.tensor(sub_batch_sizes(320))
    for _ in range(200):
        blocks = []
        for _ in range(16):
            means = PROBLEM.means(sizes, generator)
            total = (means * sizes[:, None]).sum(0) / sizes.sum()
            blocks.append(GroupNorms(sizes, means.square().sum(1), total.square().sum().item()))
        found = noise_scale(blocks)
        covered += found.lower <= PROBLEM.noise_scale <= found.upper and not found.unbounded
        estimates.append(found.noise / found.signal)
    assert 182 <= covered <= 198  # 95 % of 200 are 190; three standard deviations are 9
    assert median(estimates) == pytest.approx(10.5, rel=0.02)


def test_a_mean_of_samples_is_drawn_from_its_law():
    """The vectors that stand for batches against means of single samples, drawn one by one."""
    problem = SyntheticGradients(signal=0.5, noise=3.0, dimension=7)
    generator = torch.Generator().manual_seed(1)
    singles = problem.means(torch.ones(40 * 4000), generator).view(4000, 40, 7)
    parts = [part.mean(1) for part in singles.split(32, dim=1)]  # 32 samples and 8
    slow = (0.5 * (parts[0] + parts[1])).square().sum(1)
    fast = problem.means(torch.full((4000,), effective_size(40)), generator).square().sum(1)
    for power in (1, 2):
        a, b = slow**power, fast**power
        error = math.sqrt((a.var() + b.var()).item() / 4000)
        assert abs(a.mean() - b.mean()).item() < 4 * error
    assert slow.mean().item() == pytest.approx(0.5 + 3.0 / effective_size(40), rel=0.03)


def expected_published(signal: float, noise: float, b: int, big_b: int) -> float:
    """The published estimate where every square norm is its expectation."""
    small, large = (signal + noise / effective_size(size) for size in (b, big_b))
    signal_found, noise_found = published_estimate(b, big_b, (small, large), [(small, large)] * 2)
    return noise_found / signal_found


@pytest.mark.parametrize(
    ("b", "big_b", "true_size"), [(50, 5000, 5000), (50, 500, 5000), (100, 10000, 5000), (25, 2500, 25000)]
)
@pytest.mark.parametrize(("signal", "noise"), [(0.0135, 0.14175), (1.07, 1.5), (0.05, 0.14)])
def test_correction_inverts_both_errors(signal, noise, b, big_b, true_size):
    gns = expected_published(signal, noise, b, big_b)
    grad_norm = math.sqrt(signal + noise / effective_size(true_size))
    found = corrected(gns, grad_norm, b, big_b, true_size)
    assert found == pytest.approx((signal, noise), rel=1e-6)


def test_published_estimator_fails_where_it_did():
    with pytest.raises(EstimateFailed, match="not positive"):
        published_estimate(50, 500, (0.01, 0.02), [(0.01, 0.02)])
    with pytest.raises(EstimateFailed, match="all 2 draws"):
        published_estimate(50, 500, (2e-4, 1e-4), [(2e-4, 1e-4)] * 2)
    signal, _ = published_estimate(10, 100, (4.0, 1.0), [(4.0, 1.0), (4.0, 0.1)])
    assert signal == pytest.approx((100 * 1.0 - 10 * 2.0) / 90)  # the second draw is negative and left out


TRUTHS = {(40000, 0): (0.004, 0.15), (40000, 101): (0.02, 0.15), (50000, None): (0.0054, 0.09)}


def write_table(path) -> dict:
    """Rows of known (|G|^2, S), two of each cell with estimates a little apart; returns what is expected."""
    rows, expected = [], {}
    for (step, low), (signal, noise) in TRUTHS.items():
        grad_norm = math.sqrt(signal + noise / effective_size(5000))
        gns = expected_published(signal, noise, 50, 5000)
        values = [gns * 0.9, gns, gns * 1.2]
        expected[Cell(step, low, 50, 5000, 2, 0.1)] = sum(values) / 3
        for value in values:
            row = dict.fromkeys(COLUMNS, "")
            row |= {"model": f"{step:07d}.pt", "true_portion": 0.1, "diff_steps": 1000, "B": 5000, "b": 50, "reps": 2,
                    "gns_est": value, "g_norm": grad_norm, "b_true": 5000, "runtime": "0:04:30.500000"}  # fmt: skip
            row |= {} if low is None else {"t_min": low, "t_max": low + 99}
            rows.append(row)
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    return expected


def test_tables_are_read_reported_and_corrected(tmp_path):
    expected = write_table(tmp_path / "cells.csv")
    (name, rows), *others = read_tables(tmp_path).items()
    assert name == "cells" and not others and len(rows) == 9
    first = rows[0]
    assert isinstance(first, PublishedRow) and (first.b, first.big_b, first.reps, first.t_max) == (50, 5000, 2, 99)
    assert first.seconds == 270.5 and first.true_portion == 0.1
    assert reported_table(rows) == pytest.approx(expected)
    found = corrected_table(rows)
    assert list(found) == [Cell(*key, 50, 5000, 2, 0.1) for key in TRUTHS]
    for cell, (signal, noise) in zip(found, TRUTHS.values(), strict=True):
        assert found[cell] == pytest.approx((noise / signal, signal, noise), rel=1e-6)  # the median row is exact


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a,b\n1,2\n", "has no column 'model'"),
        (",".join(COLUMNS) + "\n", "has no rows"),
        (",".join(COLUMNS) + "\n" + ",".join(["x"] * 23) + "\n", "line 2: model: 'x' names no step"),
        (",".join(COLUMNS) + "\n0010000.pt,0.1\n", "line 2"),
        ("\x00\x00", "no column"),
    ],
)
def test_other_files_are_refused_in_one_line(tmp_path, content, message):
    (tmp_path / "other.csv").write_text(content)
    with pytest.raises(TableError, match=message) as caught:
        read_tables(tmp_path)
    assert "\n" not in str(caught.value)


EXACT = {"model": "0010000.pt", "true_portion": 0.1, "B": 5000, "b": 50, "reps": 2, "gns_est": 2.0, "g_norm": 0.2, "b_true": 5000}


def summary_of(folder, *changes: dict, name: str = "found") -> str:
    """Summary of a table of EXACT's row with each of the changes."""
    folder.mkdir(exist_ok=True)
    with open(folder / "cells.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(dict.fromkeys(COLUMNS, "") | EXACT | changed for changed in changes)
    return gns_published.run_alone(argparse.Namespace(tables=folder / "cells.csv", output=folder / name)).read_text()


def lines_of(summary: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in summary.splitlines() if line[:3] in ("| 1", "| 2")]


def test_a_table_over_shares_of_the_data_keeps_shares_and_repetitions(tmp_path):
    rows = ((0.1, 5, 1.21), (0.2, 5, 2.39), (0.5, 5, 4.45), (0.5, 2, 7.0))
    summary = summary_of(tmp_path, *(
        {"true_portion": share, "B": 2500, "b": 25, "reps": reps, "gns_est": gns, "b_true": int(50_000 * share)}
        for share, reps, gns in rows
    ))  # fmt: skip
    assert [line[1:7] for line in lines_of(summary)] == [
        ["25", "2500", "2", "0.5", "1", "7"], ["25", "2500", "5", "0.1", "1", "1.21"],
        ["25", "2500", "5", "0.2", "1", "2.39"], ["25", "2500", "5", "0.5", "1", "4.45"],
    ]  # fmt: skip


def test_bins_at_several_shares_and_repetitions_are_cells_of_their_own(tmp_path):
    summary = summary_of(tmp_path, *(
        {"t_min": low, "true_portion": share, "reps": reps, "gns_est": 10 * reps + 100 * share + low / 100}
        for share in (0.1, 0.2) for reps in (2, 5) for low in (0, 100)
    ))  # fmt: skip
    reported = [line for text in summary.split("Reported")[1:] for line in lines_of(text.split("Corrected")[0])]
    assert reported == [["10", "30", "31"], ["20", "40", "41"], ["10", "60", "61"], ["20", "70", "71"]]
    assert "Rows with b = 50, B = 5000, reps = 5." in summary and "| share of the data (%) |" in summary
    assert {path.name for path in (tmp_path / "found").glob("*.png")} == {"cells.1.png", "cells.2.png"}


def test_rows_of_all_timesteps_beside_bins_are_kept_apart(tmp_path):
    summary = summary_of(tmp_path, {"t_min": 0}, {"t_min": 0}, {"gns_est": 3.0})
    assert "(3 rows)" in summary and "All timesteps, 1 of the rows" in summary
    assert lines_of(summary)[-1][1:7] == ["50", "5000", "2", "0.1", "1", "3"]
    assert {path.name for path in (tmp_path / "found").glob("*.png")} == {"cells.png", "cells.all.png"}


@pytest.mark.parametrize("bins", [True, False])
def test_rows_without_a_correction_are_unknown(tmp_path, bins):
    low = {"t_min": 0} if bins else {}
    changes = ({"g_norm": 0}, {"g_norm": 1e200}, {"g_norm": "nan"}, {"gns_est": "nan"}, {"gns_est": -1e9})
    for number, unknown in enumerate(changes):
        lines = lines_of(summary_of(tmp_path / str(number), low, low | {"model": "20000.pt"} | unknown))
        known, other = ([line[-1 if bins else -2] for line in lines if line[0] == step] for step in ("10000", "20000"))
        assert other[-1] in ("unknown", "unbounded") and float(known[-1]) > 0, unknown


@pytest.mark.parametrize("low", ["", 0])
@pytest.mark.filterwarnings("error")
def test_estimates_that_are_not_positive_are_left_out_of_a_logarithmic_axis(tmp_path, low):
    rows = [{"t_min": low, "gns_est": -1.0}, {"t_min": low, "gns_est": 0.0, "model": "20000.pt"}]
    for name, more in (("none", []), ("one", [{"t_min": low, "model": "30000.pt"}])):
        assert "Not in the picture, since not positive" in summary_of(tmp_path, *rows, *more, name=name)


def test_optional_columns_are_left_out_where_they_cannot_be_read(tmp_path):
    unreadable = {"runtime": "soon", "true_portion": "all"}
    summary_of(tmp_path, {"runtime": "1 day, 0:00:01", "reps": "2.0"}, {"runtime": "2 days, 1:00:00.5"}, unreadable)
    rows = read_tables(tmp_path)["cells"]
    assert [(row.seconds, row.true_portion, row.reps) for row in rows] == [(86401.0, 0.1, 2), (176400.5, 0.1, 2), (None, None, 2)]


@pytest.mark.parametrize(
    ("column", "value", "said"),
    [("reps", "2.5", "'2.5' is no whole number"), ("gns_est", "much", "'much' is no number"), ("t_min", "0.1", "no whole number"),
     ("t_max", "inf", "no whole number"), ("b", "", "'' is no number"), ("B", "1e400", "no whole number")],
)  # fmt: skip
def test_required_columns_that_cannot_be_read_are_named(tmp_path, column, value, said):
    with pytest.raises(StudyError, match=rf"cells\.csv, line 2: {column}: .*{said}") as caught:
        summary_of(tmp_path, {column: value})
    assert "\n" not in str(caught.value)


def test_a_folder_without_tables_is_refused(tmp_path):
    with pytest.raises(TableError, match="no CSV file"):
        read_tables(tmp_path)


def test_published_allocations():
    assert p1_shares([1.0, 3.0]) == pytest.approx([0.25, 0.75])
    assert softmax_shares([183.0, 253.0, 29.0], 10) == pytest.approx([math.exp(-7), 1.0, math.exp(-22.4)], rel=2e-3)
    assert sum(softmax_shares([1e6, 1.0], 1)) == 1.0  # without overflow
