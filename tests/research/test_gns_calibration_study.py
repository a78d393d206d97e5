"""Calibration of noise scales on a run: rows, resumption by cell, what is refused, and the report from tables alone."""

import argparse
import math
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from research import gns_calibration
from research.frame import StudyRun
from research.offline_gradients import Gradients
from tests.research.small_runs import SMALL, trained_folder
from tests.research.tables import rows_of
from torchtitan.weights.trained_model import read_config

CONFIG = SMALL + """[training]
steps = 4
local_batch_size = 16
global_batch_size = 16
[optimizer]
lr = 1e-2
beta2 = 0.9
[lr_scheduler]
warmup_steps = 0
[[ema.tracks]]
name = "slow"
decay = 0.99
[metrics]
enable_tensorboard = false
[checkpoint]
interval = 2
[sampling]
enable = false
"""
TINY = ["--batches", "1", "8", "--samples", "1024", "--replicates", "8", "--held", "8"]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return trained_folder(tmp_path_factory.mktemp("calibration"), "trained", CONFIG)


def test_cells_are_measured_once_and_reported_from_their_tables(run, study, tmp_path):
    first, whole = ["--edges", 0, 0.5], ["--edges", 0, 0.5, 1]
    options = ["gns_calibration", run, "--steps", 4, *TINY, "--output", tmp_path / "cells"]
    assert study(*options, *first)[0] == 0
    before, results = rows_of(tmp_path / "cells"), tmp_path / "cells" / "results.csv"
    assert [row["status"] for row in before] == ["ok"], before[0]["reason"]
    with open(results, "a") as file:
        file.write("step-00000004,digits,4,")  # cut off by a kill
    code, output, _ = study(*options, *whole)
    rows = rows_of(tmp_path / "cells")
    assert code == 0 and rows[:1] == before and [row["bin"] for row in rows] == ["0", "1"]
    row = rows[0]
    for name in ("b_g", "b_g_v14", "b_g_v12", "plain_half", "adam_half"):
        value, lower, upper = (float(row[f"{name}{end}"]) for end in ("", "_lower", "_upper"))
        assert math.isnan(value) or lower <= value <= upper
    for update in ("plain", "adam"):
        progress = [float(value) for value in row[f"{update}_progress"].split()]
        assert len(progress) == 3 and progress[-1] > 0 and all(math.isfinite(value) for value in progress)
    assert "torch" in row["machine"] and float(row["loss"]) > 0 and float(row["mass"]) > 0.4
    summary = Path(output.strip()).read_text()
    assert "## Cells" in summary and "calibration.png" in summary

    content = results.read_bytes()
    code, output, _ = study("gns_calibration_report", tmp_path / "cells", "--output", tmp_path / "report")
    text = Path(output.strip()).read_text()
    assert code == 0 and "too few cells" in text and "## Cells" in text and results.read_bytes() == content
    with Image.open(tmp_path / "report" / "calibration.png") as image:
        assert image.width >= 900


def test_preconditioner_is_that_of_the_checkpoints_optimizer(run):
    opened = StudyRun(run, read_config(run / "config.toml"), [4], "none", argparse.Namespace(), torch.device("cpu"))
    trained = opened.model(4)
    source = Gradients(trained.model, trained.objective, opened.dataset("train"), label_dropout=0.0, horizontal_flip=False,
                       seed=0, device=opened.device)  # fmt: skip
    found = gns_calibration.adam_scale(opened, 4, source)
    saved: dict[str, torch.Tensor] = {}
    for file in (run / "checkpoint" / "step-00000004").glob("*.safetensors"):
        saved |= load_file(file)
    named = dict(trained.model.named_parameters())
    for part, name in zip(found.split([parameter.numel() for parameter in named.values()]), named, strict=True):
        assert saved[f"optimizer.{name}.step"].item() == 4
        root = (saved[f"optimizer.{name}.exp_avg_sq"].double() / (1 - 0.9**4)).sqrt()
        torch.testing.assert_close(part.double(), (1 / (root + 1e-8)).flatten(), rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--weights", "slow"], "is an average, without second moments of Adam"),
        (["--samples", 512], "--samples: must be at least 1024"),
        (["--samples", 1500], "--samples: must be a multiple of 512"),
        (["--replicates", 9], "--replicates: must be even"),
        (["--batches", 8, 1], "--batches: must rise"),
        (["--batches", 1, 1024], "to less than --samples (1024)"),
        (["--edges", 0.5, 0.2], "--edges: "),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(run, study, tmp_path, words, reason):
    code, output, error = study("gns_calibration", run, *TINY, "--output", tmp_path / "none", *words)
    assert code == 2 and reason in error and error.count("\n") == 1 and not output
    assert not (tmp_path / "none").exists()


def test_other_optimizers_are_refused(run, study, tmp_path):
    other = tmp_path / "muon"
    (other / "checkpoint").mkdir(parents=True)
    config = (run / "config.toml").read_text()
    assert 'name = "AdamW"' in config
    (other / "config.toml").write_text(config.replace('name = "AdamW"', 'name = "Muon"'))
    (other / "checkpoint" / "step-00000004").symlink_to(run / "checkpoint" / "step-00000004")
    code, _, error = study("gns_calibration", other, *TINY)
    assert code == 2 and "optimizer.name = Muon has no second moment of each weight" in error


def test_tables_of_something_else_are_refused(study, tmp_path):
    table = tmp_path / "results.csv"
    for content, reason in (("model,step\na,1\n", "is no table of gns_calibration"), (None, "cannot be read")):
        if content is None:
            table.unlink()
        else:
            table.write_text(content)
        code, _, error = study("gns_calibration_report", table, "--output", tmp_path / "report")
        assert code == 2 and reason in error and error.count("\n") == 1
