"""python -m research on a run: every study, stopped and resumed, and what cannot be studied refused in one line."""

import shutil
from pathlib import Path

import pytest
from PIL import Image

from research import STUDIES, load_study
from research.published_estimator import COLUMNS
from tests.research.small_runs import SMALL, trained_folder
from tests.research.tables import rows_of, rows_of_killed

CONFIG = SMALL + """[training]
steps = 4
local_batch_size = 4
global_batch_size = 4
[lr_scheduler]
warmup_steps = 0
[[ema.tracks]]
name = "slow"
decay = 0.99
warmup_power = 0
[metrics]
enable_tensorboard = false
[checkpoint]
interval = 2
[sampling]
enable = false
"""
TINY = ["--small", "4", "--large", "8", "--reps", "3"]
PUBLISHED = ["--estimator", "published", "--small", "4", "--large", "40", "--reps", "2", "--true-portion", "0.03"]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return trained_folder(tmp_path_factory.mktemp("studies"), "trained", CONFIG)


@pytest.mark.parametrize(
    ("name", "options", "cells", "pictures"),
    [
        ("gns_bins", ["--bins", 2, *TINY], 4, ["lines", "bars", "deltas"]),
        ("gns_critical_batch", ["--edges", 0, 0.5, 1, *TINY, "--steps", 4], 3, ["training", "allocations"]),
        ("gns_accuracy", ["--portions", 0.05, 0.1, "--reps", 4, "--steps", 2], 2, ["accuracy"]),
        ("gns_hyperparameters", ["--small", 2, 4, "--factors", 2, "--reps", 2, "--repeats", 2, "--steps", 4], 4,
         ["hyperparameters"]),
    ],
)  # fmt: skip
def test_each_study_leaves_rows_pictures_and_a_summary(run, study, tmp_path, name, options, cells, pictures):
    code, output, error = study(name, run, *options, "--output", tmp_path)
    assert code == 0 and output == f"{tmp_path / 'summary.md'}\n"
    rows = rows_of(tmp_path)
    assert len(rows) == cells and set(rows[0]) >= set(COLUMNS)
    assert len({row["gns_est"] for row in rows}) == cells
    assert f"{cells} of {cells}" in error  # the progress bar
    for row in rows:
        assert (row["status"], row["estimator"], row["weights"]) == ("ok", "correct", "none")
        assert float(row["noise"]) > 0 and row["user"] == row["host"] == "" and row["ckpt_dir"] == "checkpoint"
        assert float(row["gns_est"]) == pytest.approx(float(row["noise"]) / float(row["signal"]), rel=1e-6)
        assert row["unbounded"] == "True" or float(row["lower"]) <= float(row["gns_est"]) <= float(row["upper"])
    summary = (tmp_path / "summary.md").read_text()
    assert "trained weights" in summary
    for picture in pictures:
        assert f"({picture}.png)" in summary
        with Image.open(tmp_path / f"{picture}.png") as image:
            assert len(set(image.convert("RGB").resize((90, 60)).get_flattened_data())) > 5


def test_published_estimator_records_what_fails_and_goes_by_another_key(run, study, tmp_path):
    options = ["gns_bins", run, "--bins", "4", "--steps", "4", "--output", tmp_path]
    study(*options, *PUBLISHED)
    rows = rows_of(tmp_path)
    assert len(rows) == 4 and {row["b_true"] for row in rows} == {"45"}
    for row in rows:
        if row["status"] == "ok":
            assert row["lower"] == row["upper"] == "" and float(row["signal"]) > 0 and float(row["g_norm"]) > 0
        else:
            assert row["status"] == "failed" and "the published estimator stops here" in row["reason"]
    summary = (tmp_path / "published" / "summary.md").read_text()
    assert "for comparison only" in summary
    failed = [row for row in rows if row["status"] == "failed"]
    assert summary.count("stops here") == len(failed) and ("Failed cells" in summary) == bool(failed)
    study(*options, *TINY)
    assert [row["estimator"] for row in rows_of(tmp_path)] == ["published"] * 4 + ["correct"] * 4
    correct = {name: (tmp_path / name).read_bytes() for name in ("summary.md", "lines.png")}
    assert b"for comparison only" not in correct["summary.md"]
    study(*options, *PUBLISHED)
    assert {name: (tmp_path / name).read_bytes() for name in correct} == correct
    assert (tmp_path / "published" / "lines.png").is_file()


def test_every_weight_track_is_measured_apart(run, study, tmp_path):
    options = ["gns_bins", run, "--bins", "1", "--steps", "4", *TINY, "--output", tmp_path]
    for track, words in (("none", "trained weights"), ("slow", "EMA weights (slow)")):
        study(*options, "--weights", track)
        assert words in (tmp_path / "summary.md").read_text()
    live, averaged = rows_of(tmp_path)
    assert (live["weights"], averaged["weights"]) == ("none", "slow") and live["gns_est"] != averaged["gns_est"]


def test_a_damaged_checkpoint_is_a_row_and_can_be_tried_again(run, study, tmp_path, caplog):
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    manifest = copy / "checkpoint" / "step-00000002" / "manifest.json"
    kept = manifest.read_text()
    manifest.unlink()
    options = ["gns_bins", copy, "--bins", "1", *TINY]
    code, _, error = study(*options)
    results = copy / "studies" / "gns_bins"
    assert code == 0 and [row["status"] for row in rows_of(results)] == ["failed", "ok"]
    assert "1 of 2 cells failed, the first with: " in caplog.text and "--retry-failed" in caplog.text
    code, _, error = study(*options, "--steps", "2")
    assert code == 1 and "1 of 1 cell failed" in error
    assert "manifest.json is missing" in rows_of(results)[0]["reason"]
    manifest.write_text(kept)
    study(*options)
    assert len(rows_of(results)) == 2  # a failed cell is a finished one
    study(*options, "--retry-failed")
    assert [row["status"] for row in rows_of(results)] == ["failed", "ok", "ok"]
    assert "Cells without" not in (results / "summary.md").read_text()


def test_a_killed_study_goes_on_without_repeating_a_row(run, study, tmp_path):
    options = ["gns_bins", run, "--bins", "6", "--small", "8", "--large", "64", "--reps", "3", "--output", tmp_path]
    before, results = rows_of_killed(options, tmp_path), tmp_path / "results.csv"
    assert 2 <= len(before) < 12
    with open(results, "a") as file:
        file.write("step-00000004,0.1,,8")  # cut off in the middle of a row
    code, _, _ = study(*options)
    rows = rows_of(tmp_path)
    assert code == 0 and len(rows) == 12 and rows[: len(before)] == before
    assert len({(row["model"], row["t_min"]) for row in rows}) == 12
    content = results.read_bytes()
    study(*options)
    assert results.read_bytes() == content  # nothing left to do


def test_a_cell_is_the_same_number_whatever_else_is_measured(run, study, tmp_path):
    wanted = {}
    for name, edges in (("a", [0, 0.5, 1]), ("b", [0.5, 1])):
        study("gns_bins", run, "--steps", "2", "--edges", *edges, *TINY, "--output", tmp_path / name)
        wanted[name] = rows_of(tmp_path / name)[-1]["gns_est"]
    assert wanted["a"] == wanted["b"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["gns_bin", "."], "no such study (there are: gns_accuracy"),
        (["gns_bins"], "required: RUN_FOLDER"),
        (["gns_bins", "{empty}"], "is no run folder"),
        (["gns_bins", "{run}", "--weights", "fast"], "there are: none, slow"),
        (["gns_bins", "{run}", "--steps", "3"], "3 is no checkpoint of the run (there are: 2, 4)"),
        (["gns_bins", "{run}", "--steps", "few"], "invalid int value"),
        (["gns_bins", "{run}", "--small", "8", "--large", "8"], "less than B"),
        (["gns_bins", "{run}", "--reps", "1"], "needs 2 at least"),
        (["gns_bins", "{run}", "--bins", "2", "--edges", "0", "0.5", "1"], "--bins: has no effect with --edges"),
        (["gns_bins", "{run}", "--unit", "index"], "--unit: has no effect without --edges"),
        (["gns_bins", "{run}", "--true-portion", "0.2"], "--true-portion: the correct estimator has none"),
        (["gns_bins", "{run}", "--edges", "0", "2"], "reaches beyond the timesteps"),
        (["gns_bins", "{run}", "--edges", "-1", "0.5"], "reaches beyond the timesteps"),
        (["gns_bins", "{run}", "--edges", "0", "100", "--unit", "index"], "only a DDPM path has indices"),
        (["gns_bins", "{run}", "--edges", "0.5", "0.2"], "is empty"),
        (["gns_bins", "{run}", "--bins", "0"], "at least 1"),
        (["gns_accuracy", "{run}", "--portions", "0"], "not positive"),
        (["gns_accuracy", "{run}", "--portions", "0.001"], "too little for 16 blocks"),
        (["gns_hyperparameters", "{run}", "--repeats", "0"], "at least 1"),
        (["gns_bins", "{run}", "--output", "{file}"], "cannot be written"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(run, study, tmp_path, words, message):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    places = {"run": run, "empty": tmp_path / "empty", "file": tmp_path / "file"}
    code, output, error = study(*(word.format(**places) for word in words))
    assert code == 2 and output == "" and message in error
    assert error.count("\n") == 1


def test_results_of_other_columns_are_not_touched(run, study, tmp_path):
    for text, said in (("a,b\n1,2\n", "which is not this study's; nothing was written"), ("model,b\n1,2", "has other columns")):
        (tmp_path / "results.csv").write_text(text)
        code, _, error = study("gns_bins", run, *TINY, "--output", tmp_path)
        assert code == 2 and said in error and error.count("\n") == 1
        assert (tmp_path / "results.csv").read_text() == text


def test_the_list_of_studies_and_every_help(study):
    code, output, _ = study("--help")
    assert code == 0 and all(name in output for name in STUDIES)
    for name in STUDIES:
        code, output, _ = study(name, "--help")
        assert code == 0 and "--output" in output


def test_every_study_has_what_its_entry_declares():
    of_a_run = ("COLUMNS", "KEY", "UNIT", "add_options", "cells", "cost", "measure", "report")
    for name, entry in STUDIES.items():
        parts = of_a_run if entry.of_a_run else ("add_options", "run_alone")
        assert [part for part in parts if not hasattr(load_study(name), part)] == []
        assert entry.of_a_run != hasattr(load_study(name), "run_alone")
