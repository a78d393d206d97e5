"""Statistics and report of samples to a target, on synthetic records with known hyperbolas and noise scales."""

import argparse
import csv
import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from torchtitan.experiments.folder import StudyError
from torchtitan.statistics.interval import Interval
from torchtitan_dit.studies.samples_to_target_report import rank_verdict, ratio_verdict, run_alone
from torchtitan_dit.studies.samples_to_target_statistics import (
    agreements,
    edges_of,
    noise_scale,
    ratio,
    read_study,
    target_result,
)

BATCHES, FACTORS, SEEDS = (8, 16, 32, 64, 128), (0.25, 0.5, 1.0, 2.0, 4.0), 4
# Loss and target -> E_min, B_c, and B over B_c in the plain geometry; in the Adam one it is ten times that.
TRUTH = {("excess_loss", 0.5): (5000.0, 60.0, 0.8), ("excess_loss", 0.35): (9000.0, 90.0, 0.8)} | {
    (f"excess_loss_by_bin/{place}", 0.2): (6000.0, critical, 0.5) for place, critical in enumerate((20.0, 40.0, 80.0, 160.0))
}
BEST = 1.2  # factor of the rate with the least samples
WHOLE = "excess_loss <= 0.5"


def names() -> list[str]:
    return [f"{loss} <= {value:g}" for loss, value in TRUTH]


def write_table(path: Path, rows: list[dict]) -> None:
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def runs(generator: np.random.Generator, best: float = BEST) -> list[dict]:
    rows = []
    for seed in range(SEEDS):
        for batch in BATCHES:
            for factor in FACTORS:
                loss = 1 + 0.3 * math.log(factor / best) ** 2
                row = {
                    "run": f"b{batch}_f{factor:g}_s{seed}", "status": "ok", "reason": "", "batch": batch, "lr": 0.01 * factor,
                    "factor": factor, "seed": seed, "at_most": "", "machine": "synthetic", "commit": "0",
                }  # fmt: skip
                for name, (least, critical, _) in zip(names(), TRUTH.values(), strict=True):
                    noise = 1 + 0.01 * generator.standard_normal()
                    row[name] = least * (1 + batch / critical) * loss * noise
                rows.append(row)
    return rows


def noise_rows(generator: np.random.Generator) -> list[dict]:
    rows = []
    for seed in range(SEEDS):
        for name, (_, critical, share) in zip(names(), TRUTH.values(), strict=True):
            for geometry, factor in (("plain", 1.0), ("adam", 10.0)):
                for age in ("half", "target"):
                    noise = critical * share * factor * (1 + 0.02 * generator.standard_normal())
                    rows.append({"run": f"b32_f1_s{seed}", "target": name, "geometry": geometry, "age": age, "seed": seed,
                                 "signal": 1.0, "noise": noise})  # fmt: skip
    return rows


def write_records(folder: Path, best: float = BEST) -> Path:
    generator = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    settings = {
        "data": "digits", "flavor": "debug", "batch": 32, "lr": 0.01, "rule": "sqrt", "batches": BATCHES, "factors": FACTORS,
        "seeds": SEEDS, "targets": list(TRUTH),
    }  # fmt: skip
    (folder / "settings.json").write_text(json.dumps(settings))
    write_table(folder / "training.csv", runs(generator, best))
    write_table(folder / "noise_scales.csv", noise_rows(generator))
    return folder


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    return write_records(tmp_path_factory.mktemp("records") / "study")


def standard_errors(least: float, critical: float) -> np.ndarray:
    """Standard errors of E_min and B_c: the runs' 1 % of noise, in means over seeds, by linear propagation."""
    batches = np.array(BATCHES)
    slopes = np.stack([np.full(len(batches), 1 / least), -batches / (critical**2 * (1 + batches / critical))], axis=1)
    return 0.01 / SEEDS**0.5 * np.sqrt(np.diag(np.linalg.inv(slopes.T @ slopes)))


def test_hyperbola_of_tuned_samples_is_the_one_that_was_put_in(written):
    record = read_study(written)
    assert record.targets == names() and record.missing == 0
    for name, (least, critical, share) in zip(names(), TRUTH.values(), strict=True):
        found = target_result(record, name)
        assert found.fit and found.critical
        of_least, of_critical = standard_errors(least, critical)
        assert found.critical.value == pytest.approx(critical, abs=4 * of_critical)
        assert found.critical.lower < critical < found.critical.upper
        assert found.fit.least.value == pytest.approx(least, abs=4 * of_least)
        rates = [tuned.best.lr for tuned in found.tuned.values() if tuned.best and tuned.best.interpolated]
        # A vertex between rates a factor of 2 apart has a standard error of 1.2 % under this noise.
        assert rates == pytest.approx([BEST] * 5, rel=4 * 0.012)
        assert found.noise["plain", "half"].value == pytest.approx(critical * share, rel=4 * 0.02 / SEEDS**0.5)
    assert record.rate(64, BEST) == pytest.approx(0.012)


def test_a_best_rate_at_the_edge_has_no_samples_and_no_fit(tmp_path):
    record = read_study(write_records(tmp_path, best=6.0))
    found = target_result(record, WHOLE)
    assert found.fit is None and found.reason == "0 tuned batch sizes, 4 are needed"
    assert all("is the highest of 5 tried" in tuned.reason and not tuned.seeds for tuned in found.tuned.values())
    assert {batch: edges_of(record, batch) for batch in BATCHES} == {batch: {"highest"} for batch in BATCHES}
    assert edges_of(read_study(write_records(tmp_path)), 8) == set()


def test_a_rate_at_which_one_seed_fails_is_none(tmp_path):
    """Of the best rate and its neighbour: the next best is taken, and not interpolated."""
    folder = write_records(tmp_path)
    rows = list(csv.DictReader((folder / "training.csv").read_text().splitlines()))
    for row in rows:
        if row["run"] == "b8_f1_s3":
            row[WHOLE] = "inf"
        if row["run"] == "b16_f2_s0":
            row["status"] = "diverged"
    write_table(folder / "training.csv", rows)
    of_batches = target_result(read_study(folder), WHOLE).tuned
    found = {batch: (best.of_grid, best.interpolated) for batch in (8, 16) if (best := of_batches[batch].best)}
    assert found == {8: (2.0, False), 16: (1.0, False)}


def test_bins_are_ranked_by_their_noise_scales(written):
    record = read_study(written)
    results = {name: target_result(record, name) for name in record.targets}
    found, of_adam = agreements(record, results)
    assert found.bins == 4 and found.rank.value == 1 and found.rank.lower == 1
    assert (found.geometry, of_adam.geometry, of_adam.rank.value) == ("plain", "adam", 1)
    assert rank_verdict(found.rank) == "ranks the bins"
    assert rank_verdict(Interval(0.0, -0.5, 0.4)) == "refuted" and rank_verdict(Interval(0.5, 0.1, 0.9)) == "undecided"
    few, _ = agreements(record, dict(list(results.items())[:4]))  # two bins
    assert few.bins == 2 and math.isnan(few.rank.value) and rank_verdict(few.rank) == "undecided"


def test_ratio_has_both_intervals_at_their_worst_and_its_verdict_follows():
    found = ratio(Interval(60, 50, 72), Interval(48, 40, 60))
    assert (found.value, found.lower, found.upper) == pytest.approx((1.25, 50 / 60, 72 / 40))
    assert ratio_verdict(found) == "predicts B_c within a factor of 2"
    assert ratio_verdict(Interval(0.1, 0.08, 0.12)) == "refuted" and ratio_verdict(Interval(1.9, 1.2, 2.6)) == "undecided"
    for unknown in (ratio(None, Interval(48, 40, 60)), ratio(Interval(60, 50, math.inf), Interval(48, 40, 60))):
        assert math.isnan(unknown.value) and ratio_verdict(unknown) == "undecided"


def test_noise_scale_over_seeds_is_a_ratio_of_means():
    found = noise_scale({0: (10.0, 1.0), 1: (14.0, 2.0), 2: (15.0, 1.5)})
    assert found.value == pytest.approx(39 / 4.5) and found.lower < 39 / 4.5 < found.upper
    assert math.isnan(noise_scale({0: (10.0, 1.0)}).value)
    assert math.isnan(noise_scale({0: (10.0, 1.0), 1: (10.0, -1.0)}).value)  # the signal is not significant


def test_report_is_made_of_the_records_alone(written, tmp_path):
    for name in ("settings.json", "training.csv", "noise_scales.csv"):
        shutil.copy(written / name, tmp_path)
    asked = argparse.Namespace(records=[tmp_path], output=tmp_path / "report")
    text = run_alone(asked).read_text()
    assert "100 runs, 0 of the planned ones missing" in text
    assert "B plain: predicts B_c within a factor of 2; B adam: refuted" in text
    assert "| plain | 4 | 1 [1, 1] | ranks the bins |" in text
    with Image.open(tmp_path / "report" / "samples_to_target_0.png") as image:
        assert image.width >= 900
    lines = (tmp_path / "training.csv").read_text().splitlines(keepends=True)
    (tmp_path / "training.csv").write_text("".join(lines[:-1]) + lines[-1][:20])  # cut off by a kill
    text = run_alone(asked).read_text()
    assert "Interim: 1 planned runs are missing, which decides nothing" in text and "refuted" not in text


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("settings.json", "{}", "holds no record of samples_to_target"),
        ("settings.json", '{"data": "digits", "targets": 3}', "holds no record of samples_to_target"),
        ("training.csv", "run,status\na,ok\n", "has no column"),
    ],
)
def test_what_is_no_record_is_refused(tmp_path, name, content, reason):
    folder = write_records(tmp_path)
    (folder / name).write_text(content)
    with pytest.raises(StudyError, match=reason):
        read_study(folder)
