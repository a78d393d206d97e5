"""Study of metrics' responses: its sets of samples, its verdicts, and a run on the digits."""

import numpy as np
import pytest

from torchtitan_dit.commands.study import main, parse_arguments
from torchtitan_dit.studies.metric_responses import NOISE, SAMPLES, Pool, Responses, read_pool
from torchtitan_dit.studies.metric_responses_report import MUST, VALUES, bounds, summary


@pytest.fixture(scope="module")
def pool():
    generator = np.random.default_rng(3)
    images = generator.integers(60, 190, (700, 8, 8, 3), dtype=np.uint8)
    return Pool(images[:300], images[300:400], images[400:], generator.permutation(np.arange(300) % 10), 100)


def test_each_set_is_changed_as_it_says(pool):
    sets = {name: make(pool) for name, make in SAMPLES.items()}
    plain = sets["held out"]
    assert all(images.shape == plain.shape and images.dtype == np.uint8 for images in sets.values())
    assert np.array_equal(plain, pool.held_out[:100]) and np.array_equal(sets["training"], pool.others)
    difference = sets["noised"].astype(float) - plain
    assert abs(difference.mean()) < 3 and difference.std() == pytest.approx(255 * NOISE, rel=0.1)
    flat = np.stack([images.reshape(100, -1).var(axis=1).mean() for images in (plain, sets["blurred"])])
    assert flat[1] < 0.8 * flat[0]
    rows = {image.tobytes(): label for image, label in zip(pool.held_out, pool.labels, strict=True)}
    classes = np.bincount([rows[image.tobytes()] // 5 for image in sets["other proportions"]])
    assert classes.tolist() == [80, 20] and len(np.unique(sets["other proportions"], axis=0)) == 100
    assert np.unique(sets["repeated"], axis=0, return_counts=True)[1].tolist() == [10] * 10
    copies = {image.tobytes() for image in pool.reference}
    assert sum(image.tobytes() in copies for image in sets["half copied"]) == 50


def row(samples, **intervals):
    """Row of results.csv; values without an interval are missing, as of a set that is too small."""
    columns = {column: "" for value in VALUES for column in bounds(value)}
    for value, ends in intervals.items():
        columns |= dict(zip(bounds(value), map(str, ends), strict=True))
    return {"samples": samples, "status": "ok"} | columns


def test_a_value_moves_where_intervals_are_apart_and_a_wrong_move_is_named():
    plain = row("held out", fd=(1.0, 0.5, 1.5), kid=(0.0, -0.001, 0.001), recall=(0.8, 0.7, 0.9))
    text = summary([
        plain,
        row("blurred", fd=(2.0, 1.6, 2.4), kid=(-0.01, -0.02, -0.005)),
        row("repeated", fd=(1.4, 1.2, 1.6), recall=(0.1, 0.05, 0.2)),
    ])
    assert "2 of 4 values that must move did so; not so: KID x 1000 of blurred, FD of repeated." in text
    assert "| blurred | **2.00 [1.60, 2.40]** | - | **-10.0 [-20.0, -5.00]** |" in text
    assert "| repeated | 1.40 [1.20, 1.60] |" in text
    assert all(set(moves) <= set(VALUES) for moves in MUST.values()) and set(MUST) < set(SAMPLES)


def test_metrics_of_digits_move_as_they_must_and_the_study_resumes(tmp_path, capsys):
    words = ["metric_responses", "digits", "--output", str(tmp_path / "study")]
    assert main(words) == 0
    table = (tmp_path / "study" / "results.csv").read_text()
    text = (tmp_path / "study" / "summary.md").read_text()
    lines = {line.split(" | ")[0].strip("| "): line.split(" | ")[1:] for line in text.splitlines() if line.startswith("| ")}
    column = list(VALUES.values()).index
    for samples in ("blurred", "noised"):
        assert all(lines[samples][column(name)].startswith("**") for name in ("FD", "KID x 1000", "density", "coverage"))
    assert lines["half copied"][column("memorised, %")].startswith("**50.0 [")
    assert lines["repeated"][column("recall")].startswith("**0 [")
    assert lines["training"][column("FD")][0] != "*" and lines["training"][column("KID x 1000")][0] != "*"
    (tmp_path / "study" / "results.csv").write_text("".join(table.splitlines(keepends=True)[:-2]))  # killed before two
    assert main(words) == 0
    again = (tmp_path / "study" / "results.csv").read_text().splitlines()
    values = [[line.split(",")[:31] for line in lines] for lines in (table.splitlines(), again)]
    assert values[0] == values[1] and len(again) == 1 + len(SAMPLES)
    assert (tmp_path / "study" / "summary.md").read_text() == text


@pytest.mark.parametrize("words, said", [
    (["digits", "--count", "99"], "--count: must be at least 100, is 99"),
    (["digits", "--count", "205", "--reference", "1200"], "more held-out images than there are (297)"),
    (["digits", "--reference", "1400"], "need as many training images; there are 1500"),
    (["digits", "--data", "nowhere"], "dataset digits has none"),
])  # fmt: skip
def test_bad_options_are_one_line_and_code_2(tmp_path, capsys, words, said):
    assert main(["metric_responses", *words, "--output", str(tmp_path / "study")]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
    assert not (tmp_path / "study").exists()


def test_sets_are_compared_in_the_features_of_the_named_extractor():
    options = parse_arguments(["metric_responses", "digits", "--count", "100", "--reference", "100"])
    study = Responses(options, read_pool(options))
    assert study.reference.extractor == "digits" and study.reference.rows["pooled"].shape == (100, 64)
    assert "100 training images" in study.description
