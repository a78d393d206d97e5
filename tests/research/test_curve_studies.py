"""The studies of losses by timestep on a run: against what is possible, stopped, resumed, and refused."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image

from research import loss_curve
from research.curve_table import LossCurve, read_curves, read_errors
from research.equal_loss import equal_loss_edges
from research.loss_curve import optimal_noise_loss
from research.timestep_errors import fixed_samples, in_parametrisation, timestep_errors, timestep_nodes
from tests.faults.forked import ForkedRun
from tests.forked import run_script
from tests.research.small_runs import trained_folder
from tests.research.tables import rows_of, rows_of_killed
from tests.research.test_timestep_errors import BestDenoiser
from torchtitan.data.synthetic import Synthetic
from torchtitan.diffusion.objectives import build_objective
from torchtitan.weights.trained_model import read_config

# One patch is the whole image: little more than a filter has to be learned. The variance puts the first inner edge
# at index 38, where 5 % are two indices. Trained in v, whose error counts at every timestep: that of the noise at high
# noise is next to nothing beside the rest, and a short training leaves it far above its optimum.
CONFIG = """
[model]
flavor = "debug"
num_layers = 2
num_heads = 1
patch_size = 4
[data]
name = "synthetic"
kind = "gaussian"
shape = [1, 4, 4]
num_classes = 0
pixel_variance = 4.0
[objective]
path = "ddpm_linear"
prediction = "v"
preconditioning = "index"
timesteps.name = "uniform"
spread = "stratified"
[optimizer]
lr = 2e-3
[lr_scheduler]
warmup_steps = 50
decay_type = "cosine"
[training]
steps = 500
local_batch_size = 256
global_batch_size = 256
[[ema.tracks]]
name = "slow"
decay = 0.99
[metrics]
enable_tensorboard = false
[checkpoint]
interval = 250
[sampling]
enable = false
"""
FEW = ["--nodes", "120", "--images", "96"]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return trained_folder(tmp_path_factory.mktemp("curves"), "gaussian", CONFIG)


@pytest.fixture(scope="module")
def measured(run) -> Path:
    """The folder of a loss_curve of the last checkpoint."""
    done = run_script("-m", "research", "loss_curve", str(run), "--steps", "500", *FEW)
    assert done.returncode == 0, done.stderr
    return run / "studies" / "loss_curve"


def test_a_trained_network_comes_near_the_least_error_and_its_slots_near_the_closed_form(run, measured, study):
    config = read_config(run / "config.toml")
    objective = build_objective(config.objective, config.debug.seed)
    nodes = timestep_nodes(objective, 120)
    best = optimal_noise_loss(config.data, nodes.log_sigma)
    samples = fixed_samples(Synthetic(config.data, "validation"), 96, 0)
    least = timestep_errors(BestDenoiser(config.data, objective), objective, samples, nodes)
    for curve in read_curves(measured / "curve.csv"):
        torch.testing.assert_close(curve.optimum * curve.noise_factor, best)
        errors = read_errors(measured / "errors.safetensors", curve.weights, curve.step)
        excess = errors - least  # of the same images and noise
        assert (excess.mean(0) > -3.5 * excess.std(0) / 96**0.5).all()
        ratio = errors.mean(0) / least.mean(0)  # in any parametrisation
        assert (ratio >= 1).all() and (ratio < 1.1).all()
        of_noise = (in_parametrisation(each, objective, nodes, "noise").mean() for each in (errors, least))
        assert next(of_noise) / next(of_noise) < 1.03
    summary = (measured / "summary.md").read_text()
    assert "Ratio to the smallest possible error" in summary and "EMA against trained weights" in summary

    code, output, _ = study("slots", run, "--compare-paper")
    assert code == 0 and output == f"{run / 'studies' / 'slots' / 'summary.md'}\n"
    every = timestep_nodes(objective)
    of_one = in_parametrisation(torch.ones(1000, dtype=torch.float64), objective, every, "noise")
    wanted = equal_loss_edges(optimal_noise_loss(config.data, every.log_sigma) / of_one, 10)
    written = json.loads((run / "studies" / "slots" / "slots.json").read_text())
    assert written["unit"] == "index" and written["edges"][0] == 0 and written["edges"][-1] == 1000
    for edge, closed in zip(written["edges"][1:-1], wanted[1:-1], strict=True):
        assert abs(edge - closed) <= 0.05 * closed
    for name in ("studies/slots/slots.png", "studies/loss_curve/curve.png"):
        with Image.open(run / name) as image:
            assert len(set(image.convert("RGB").resize((90, 60)).get_flattened_data())) > 5


def test_slots_can_be_trained_on(run, measured, study, tmp_path):
    code, _, _ = study("slots", measured / "curve.csv", "--weights", "slow", "--slots", "5", "--output", tmp_path)
    assert code == 0
    config = tmp_path / "slots.toml"
    short = CONFIG.replace("steps = 500", "steps = 2").replace("warmup_steps = 50", "warmup_steps = 0")
    named = f'timesteps.name = "slots"\ntimesteps.edges_path = "{tmp_path / "slots.json"}"'
    config.write_text(short.replace('timesteps.name = "uniform"', named))
    trained = ForkedRun(config, "on_slots")
    trained.finish()
    assert json.loads((trained.folder / "summary.json").read_text())["status"] == "completed"


def test_trained_and_ema_weights_are_measured_apart_on_the_same_samples(run, study, tmp_path):
    study("loss_curve", run, "--nodes", "6", "--images", "4", "--steps", "250", "--output", tmp_path / "both")
    trained, slow = read_curves(tmp_path / "both" / "curve.csv")
    assert (trained.weights, slow.weights) == ("none", "slow") and not torch.equal(trained.error, slow.error)
    study("loss_curve", run, "--nodes", "6", "--images", "4", "--weights", "slow", "--output", tmp_path / "slow")
    early, late = read_curves(tmp_path / "slow" / "curve.csv")
    assert torch.equal(early.error, slow.error) and (early.step, late.step) == (250, 500)
    assert not torch.equal(early.error, late.error)


def test_a_killed_curve_goes_on_and_ends_in_the_same_numbers(run, measured, study, tmp_path):
    options = ["loss_curve", run, "--steps", "500", *FEW, "--output", tmp_path]
    before = rows_of_killed(options, tmp_path)
    assert 2 <= len(before) < 6 and not (tmp_path / "curve.csv").exists()
    code, _, _ = study(*options)
    rows = rows_of(tmp_path)
    assert code == 0 and len(rows) == len(rows_of(measured)) == 6 and rows[: len(before)] == before
    assert (tmp_path / "curve.csv").read_bytes() == (measured / "curve.csv").read_bytes()


def test_more_images_keep_what_is_measured(run, study, tmp_path):
    options = ["loss_curve", run, "--steps", "500", "--weights", "none", "--nodes", "1000", "--output", tmp_path]
    study(*options, "--images", "4")
    first = rows_of(tmp_path)
    study(*options, "--images", "6")
    assert len(first) == 1 and rows_of(tmp_path)[0] == first[0] and len(rows_of(tmp_path)) == 2
    (curve,) = read_curves(tmp_path / "curve.csv")
    assert curve.images == 6 and isinstance(curve, LossCurve) and curve.discrete and len(curve.t) == 1000


def test_results_of_another_run_are_not_taken_for_one_s_own(run, study, tmp_path):
    output, copy, moved = tmp_path / "results", tmp_path / "copy", tmp_path / "moved"
    options = ["--nodes", "3", "--images", "2", "--steps", "500", "--weights", "none"]
    assert study("loss_curve", run, *options, "--output", output)[0] == 0
    before = (output / "results.csv").read_bytes()
    shutil.copytree(run, copy, ignore=shutil.ignore_patterns("studies"))
    code, _, error = study("loss_curve", copy, *options, "--output", output)
    assert code == 2 and error.count("\n") == 1 and f"results of another run, {run.resolve()}" in error
    assert (output / "results.csv").read_bytes() == before
    (output / "run.json").unlink()  # as one that was written before there were such files
    assert study("loss_curve", run, *options, "--output", output)[0] == 0 and (output / "run.json").exists()
    assert (output / "results.csv").read_bytes() == before

    assert study("loss_curve", copy, *options)[0] == 0
    copy.rename(moved)  # with its studies
    assert study("loss_curve", moved, *options)[0] == 0
    assert len(rows_of(moved / "studies" / "loss_curve")) == 1
    config = moved / "config.toml"
    config.write_text(config.read_text().replace("lr = 0.002", "lr = 0.004"))
    code, _, error = study("loss_curve", moved, *options)
    assert code == 2 and "optimizer.lr: 0.002 -> 0.004" in error
    (moved / "studies" / "loss_curve" / "run.json").write_text("{")
    code, _, error = study("loss_curve", moved, *options)
    assert code == 2 and "run.json: is damaged" in error


def test_a_model_that_gives_no_numbers_is_a_failed_cell(run, study, tmp_path, monkeypatch):
    nothing = torch.full((2, 3), torch.nan, dtype=torch.float64)
    monkeypatch.setattr(loss_curve, "timestep_errors", lambda *_, **__: nothing)
    options = ["--nodes", "3", "--images", "2", "--steps", "500", "--output", tmp_path]
    assert study("loss_curve", run, *options)[0] == 1
    assert {row["status"] for row in rows_of(tmp_path)} == {"failed"}
    assert {row["reason"] for row in rows_of(tmp_path)} == {"an error of the model is not finite"}
    assert "| weights | reason |" in (tmp_path / "summary.md").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["loss_curve", "{run}", "--weights", "fast"], "there are: none, slow"),
        (["loss_curve", "{run}", "--nodes", "1"], "at least 2"),
        (["loss_curve", "{run}", "--nodes", "1001"], "the path has 1000"),
        (["loss_curve", "{run}", "--images", "1"], "--images: must be at least 2"),
        (["loss_curve", "{run}", "--images", "20000"], "the validation split has 10000"),
        (["slots", "{empty}"], "run python -m research loss_curve"),
        (["slots", "{empty}/none.csv"], "no such run folder or curve"),
        (["slots", "{picture}"], "is no"),
        (["slots", "{table}"], "it has no column weights"),
        (["slots", "{curve}", "--slots", "1001"], "1001 slots of 1000 timesteps"),
        (["slots", "{curve}", "--slots", "0"], "--slots: must be at least 1, is 0"),
        (["slots", "{curve}", "--slots", "5", "--compare-paper"], "needs --slots 10"),
        (["slots", "{curve}", "--step", "5"], "5 is not in"),
        (["slots", "{curve}", "--weights", "fast"], "there are: none, slow"),
        (["slots", "{nan}"], "row 4: error is nan"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(run, measured, study, tmp_path, words, message):
    empty, table, nan = tmp_path / "empty", tmp_path / "table.csv", tmp_path / "nan.csv"
    empty.mkdir()
    table.write_text("a,b\n1,2\n")
    lines = (measured / "curve.csv").read_text().splitlines(keepends=True)
    values = lines[3].split(",")
    nan.write_text("".join([*lines[:3], ",".join([*values[:7], "nan", *values[8:]]), *lines[4:]]))
    places = {"run": run, "empty": empty, "table": table, "nan": nan, "curve": measured / "curve.csv",
              "picture": measured / "curve.png"}  # fmt: skip
    code, output, error = study(*(word.format(**places) for word in words))
    assert code == 2 and output == "" and message in error
    assert error.count("\n") == 1
