"""python -m research forgetting and oracle_replace on a small run: tables, going on after a stop, bad input."""

import json
import shutil
from pathlib import Path

import pytest
from PIL import Image

from tests.end_to_end.tools import table
from tests.research.small_runs import trained_folder
from tests.research.test_gns_studies import CONFIG

DDPM = """
[objective]
path = "ddpm_linear"
prediction = "v"
timesteps.name = "uniform"
"""
SMALL = ["--finetune-steps", "4", "--batch", "8", "--seeds", "2", "--images", "8", "--nodes", "2", "--steps", "4"]
GRADIENTS = ["--gradient-samples", "16", "--gradient-repeats", "2"]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return trained_folder(tmp_path_factory.mktemp("slots"), "trained", CONFIG + DDPM)


@pytest.fixture(scope="module")
def flow_run(run, tmp_path_factory) -> Path:
    """The same weights on a path without indices."""
    copy = tmp_path_factory.mktemp("flow") / "flow"
    shutil.copytree(run, copy)
    config = copy / "config.toml"
    config.write_text(config.read_text().replace('path = "ddpm_linear"', 'path = "rectified_flow"'))
    return copy


def numbers(folder: Path) -> list[tuple[str, ...]]:
    """What was measured, without dates and run times."""
    names = ("kind", "trained", "measured", "draw", "error", "product", "errors", "status")
    return [tuple(row[name] for name in names) for row in table(folder / "results.csv")]


def test_forgetting_leaves_a_matrix_and_goes_on_where_it_was(run, study, tmp_path):
    options = ["forgetting", run, "--slots", "3", "--groups", "1,3", *SMALL, *GRADIENTS, "--output", tmp_path]
    code, output, _ = study(*options)
    assert code == 0 and output == f"{tmp_path / 'summary.md'}\n"
    whole, matrix = numbers(tmp_path), (tmp_path / "matrix.csv").read_bytes()
    assert len(whole) == 3 + (3 + 1 + 1) * 2 * 3 + 2 * 6  # before, (slots + group + control) x seeds, products
    assert {row[-1] for row in whole} == {"ok"}
    edges = json.loads((tmp_path / "slots-step-00000004-none-validation-0-3.json").read_text())
    assert edges["unit"] == "index" and (edges["edges"][0], edges["edges"][-1]) == (0, 1000)

    rows = table(tmp_path / "matrix.csv")
    assert [row["trained"] for row in rows[::3]] == ["all timesteps", "slot 1", "slot 2", "slot 3", "slots 1,3"]
    for row in rows:
        assert float(row["lower"]) <= float(row["factor"]) <= float(row["upper"])
        if row["trained"] == "all timesteps":
            assert float(row["over_control"]) == 1.0
    summary = (tmp_path / "summary.md").read_text()
    assert "of 6 entries have F above 1" in summary and "The control, on every slot:" in summary
    for picture in ("forgetting", "cosines"):
        assert f"({picture}.png)" in summary
        with Image.open(tmp_path / f"{picture}.png") as image:
            assert len(set(image.convert("RGB").resize((90, 60)).get_flattened_data())) > 5

    results = tmp_path / "results.csv"
    lines = results.read_text().splitlines(keepends=True)
    results.write_text("".join(lines[:9]) + lines[9][:40])  # killed within a training, in the middle of a row
    assert study(*options)[0] == 0
    assert numbers(tmp_path) == whole and (tmp_path / "matrix.csv").read_bytes() == matrix


def test_parts_of_gradient_samples_are_known_by_their_size(run, study, tmp_path):
    options = ["forgetting", run, "--slots", "2", *SMALL, "--finetune-steps", "0", "--output", tmp_path]
    sizes = []
    for repeats in ("4", "2", "4"):
        assert study(*options, "--gradient-samples", "16", "--gradient-repeats", repeats)[0] == 0
        products = [row for row in table(tmp_path / "results.csv") if row["kind"] == "product"]
        sizes.append([row["samples"] for row in products])
    assert sizes == [["4"] * 12, ["4"] * 12 + ["8"] * 6, ["4"] * 12 + ["8"] * 6]  # two slots have three pairs


def test_a_training_that_diverges_in_its_last_step_has_no_answer(run, study, tmp_path):
    options = ["--slots", "2", *SMALL, "--finetune-steps", "1", "--lr", "1e30", "--gradient-samples", "0"]
    assert study("forgetting", run, *options, "--output", tmp_path)[0] == 0
    rows = table(tmp_path / "results.csv")
    failed = {row["reason"] for row in rows if row["kind"] == "after"}
    assert failed == {"an error of the model is not finite"} and rows[0]["status"] == "ok"


def test_no_training_changes_nothing(run, flow_run, study, tmp_path):
    for name, folder in (("ddpm", run), ("flow", flow_run)):
        options = ["--slots", "2", *SMALL, "--finetune-steps", "0", "--gradient-samples", "0"]
        assert study("forgetting", folder, *options, "--output", tmp_path / name)[0] == 0
        for row in table(tmp_path / name / "matrix.csv"):
            assert [row[column] for column in ("factor", "lower", "upper", "over_control")] == ["1"] * 4
        assert "0 of 2 entries have F above 1" in (tmp_path / name / "summary.md").read_text()
    assert {row["measured_timesteps"] for row in table(tmp_path / "flow" / "matrix.csv")} == {"0-0.5", "0.5-1"}


def test_oracle_replacement_leaves_a_table_and_goes_on_where_it_was(run, study, tmp_path):
    options = [
        "oracle_replace", run, "--steps", "4", "--num-steps", "12", "--images", "6", "--batch-size", "3", "--ranges",
        "100-999,1-99,0-9", "--output", tmp_path,
    ]  # fmt: skip
    assert study(*options)[0] == 0
    found = {(row["variant"], row["low"]): float(row["rmse"]) for row in table(tmp_path / "ranges.csv")}
    assert len(found) == 1 + 3 * 3
    assert found["replace", "0"] == 0.0 and found["replace", "1"] > 0 and found["none", ""] > 0
    assert found["except", "100"] == found["except", "1"] == 0.0 < found["except", "0"]
    assert found["inject", "0"] > 0 and "(ranges.png)" in (tmp_path / "summary.md").read_text()

    results, ranges = tmp_path / "results.csv", (tmp_path / "ranges.csv").read_bytes()
    lines = results.read_text().splitlines(keepends=True)
    results.write_text("".join(lines[:8]) + lines[8][:30])  # the chain that nothing was done to is not in memory then
    assert study(*options)[0] == 0
    assert (tmp_path / "ranges.csv").read_bytes() == ranges and len(table(results)) == len(lines) - 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["forgetting", "{run}"], "one checkpoint at a time"),
        (["forgetting", "{run}", "--slots", "1"], "--slots: must be at least 2"),
        (["forgetting", "{run}", "--slots", "1001"], "1001 slots of 1000 timesteps"),
        (["forgetting", "{run}", "--groups", "1,x"], "are no slot numbers"),
        (["forgetting", "{run}", "--groups", "4"], "not two different slots"),
        (["forgetting", "{flow}", "--slots", "2", "--groups", "1,12"], "no slot 12 (there are: 1 to 2)"),
        (["forgetting", "{run}", "--lr", "nan"], "--lr: must be positive"),
        (["forgetting", "{run}", "--images", "100000"], "the validation split has"),
        (["forgetting", "{run}", "--gradient-samples", "100"], "is no multiple of 2 x 8"),
        (["oracle_replace", "{flow}"], "has no indices"),
        (["oracle_replace", "{run}", "--ranges", "9-0"], "is reversed (try 0-9)"),
        (["oracle_replace", "{run}", "--ranges", "0-x"], "is no range of indices"),
        (["oracle_replace", "{run}", "--ranges", "1000-1200"], "goes beyond the path's last index, 999"),
        (["oracle_replace", "{run}", "--ranges", "0-5000"], "goes beyond the path's last index, 999"),
        (["oracle_replace", "{run}", "--ranges", "1-1", "--num-steps", "4"], "holds no index of the chain"),
        (["oracle_replace", "{run}", "--num-steps", "1001"], "give 2 to 1000"),
        (["oracle_replace", "{run}", "--error-size", "0"], "must be positive"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(run, flow_run, study, words, message):
    places = {"run": run, "flow": flow_run}
    step = ["--steps", "2", "4"] if message.startswith("one checkpoint") else ["--steps", "4"]
    code, output, error = study(*(word.format(**places) for word in words), *step)
    assert code == 2 and output == "" and message in error, error
    assert error.count("\n") == 1
    assert not (run / "studies").exists()
