"""Samples to a target on tiny runs: stopped and resumed by row, extended at an edge, reported, and refused in one line."""

import argparse
import json
import math
import re
import shlex
from pathlib import Path

import pytest

from tests.end_to_end.test_grid_studies import Trainings
from tests.end_to_end.tools import load_tool, table
from tests.launcher import ROOT
from torchtitan.config.job import dump_config, load_config
from torchtitan.experiments import training
from torchtitan.experiments.outcome import Outcome
from torchtitan_dit.studies.samples_to_target import plan_runs, read_base

CONFIG = """
[model]
flavor = "DiT-S/2"
dim = 16
num_layers = 1
num_heads = 2
mlp_hidden_dim = 32
[data]
name = "digits"
[training]
local_batch_size = -1
max_local_batch_size = 64
global_batch_size = 16
[optimizer]
lr = 4e-3
[lr_scheduler]
warmup_steps = 0
decay_type = "constant"
[metrics]
enable_tensorboard = false
loss_bins = 2
[validation]
enable = true
interval = 2
num_images = 16
excess_images = 16
[[validation.targets]]
loss = "excess_loss"
value = 1.55
[[validation.targets]]
loss = "excess_loss"
value = 1.45
[[validation.targets]]
loss = "excess_loss_by_bin/1"
value = 1.5
"""
GRID = ["--batches", "8,16,32", "--factors", "0.5,1,2", "--seeds", "2"]
TARGETS = ("excess_loss <= 1.55", "excess_loss <= 1.45", "excess_loss_by_bin/1 <= 1.5")
REAL = ("b16_f1_s0", "b16_f1_s1", "b32_f2_s0")


class SomeTrainings(Trainings):
    """Trains the runs of `real`; of the others only a summary is written, with samples of a known best rate."""

    real = REAL
    best = 1.0  # factor of the rate

    def __call__(self, arguments, *, processes, log, **options) -> Outcome:
        if log.stem in self.real or log.stem == self.stop:
            return super().__call__(arguments, processes=processes, log=log, **options)
        self.names.append(log.stem)
        config, folder = load_config(arguments, processes), log.with_suffix("")
        batch, (_, factor, seed) = config.training.global_batch_size, log.stem.split("_")
        samples = 90 * (1 + batch / 60) * (1 + math.log(float(factor[1:]) / self.best) ** 2) * (1 + 0.01 * int(seed[1:]))
        reached = {name: {"n_images_seen": samples, "step": 9, "interpolated": 1} for name in TARGETS}
        folder.mkdir()
        (folder / "config.toml").write_text(dump_config(config))
        (folder / "metrics.jsonl").touch()
        (folder / "summary.json").write_text(json.dumps({"step": 9, "n_images_seen": 9 * batch, "targets": reached}))
        return Outcome("ok", "", 0.1, 0)


@pytest.fixture
def config(tmp_path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(CONFIG)
    return path


@pytest.fixture
def trainings(monkeypatch) -> SomeTrainings:
    found = SomeTrainings()
    monkeypatch.setattr(training, "run_processes", found)
    return found


def test_runs_end_at_their_targets_and_are_resumed_by_row(config, trainings, study, tmp_path):
    folder = tmp_path / "results"
    words = ["samples_to_target", config, *GRID, "--extensions", 0, "--samples", 800, "--output", folder]
    trainings.stop = "b16_f2_s0"
    code, _, error = study(*words)
    assert code == 130 and "the same command resumes" in error
    before = (folder / "training.csv").read_bytes()
    assert trainings.names == ["b8_f0.5_s0", "b8_f1_s0", "b8_f2_s0", "b16_f0.5_s0", "b16_f1_s0"]
    trainings.names.clear()
    code, output, error = study(*words)
    assert code == 0, error
    assert (folder / "training.csv").read_bytes().startswith(before)
    assert len(trainings.names) == 13 and trainings.names[0] == "b16_f2_s0"
    rows = table(folder / "training.csv")
    assert len(rows) == 18 and {row["status"] for row in rows} == {"ok"}, rows
    of_run = {row["run"]: row for row in rows}
    for row in (of_run[name] for name in REAL):
        reached = [float(row[name]) for name in TARGETS]
        # Stopped at the validation that saw the last crossing: 32 images after the one before.
        assert reached[0] <= reached[1] and max(reached) <= int(row["images"]) <= max(reached) + 32
        assert int(row["images"]) < 800 and int(row["images"]) == int(row["steps"]) * int(row["batch"])
    lrs = {(row["batch"], row["factor"]): float(row["lr"]) for row in rows}
    assert lrs["32", "2"] == pytest.approx(4e-3 * 2**0.5 * 2) and lrs["8", "0.5"] == pytest.approx(1e-3 * 2**0.5)
    assert not list((folder / "runs").glob("*/checkpoint"))

    noise = table(folder / "noise_scales.csv")
    assert {row["run"] for row in noise} == {"b16_f1_s0", "b16_f1_s1"}
    assert {(row["geometry"], row["age"]) for row in noise} <= {(a, b) for a in ("plain", "adam") for b in ("half", "target")}
    for row in noise:
        assert 16 * int(row["step"]) <= float(row["images"])  # never of later weights
    half = [row for row in noise if row["age"] == "half"]
    assert all(float(row["images"]) == pytest.approx(float(of_run[row["run"]][row["target"]]) / 2) for row in half)

    trainings.names.clear()
    assert study(*words)[0] == 0 and trainings.names == []
    first = Path(output.strip()).read_text()
    code, output, _ = study("samples_to_target_report", folder, "--output", tmp_path / "report")
    assert code == 0 and Path(output.strip()).read_text() == first
    assert "18 runs, 0 of the planned ones missing" in first and "tuned batch sizes, 4 are needed" in first

    config.write_text(CONFIG.replace("1.45", "1.4"))
    code, _, error = study(*words)
    assert code == 2 and "a study with other settings, targets" in error and error.count("\n") == 1


def test_rates_are_extended_beyond_an_edge_as_often_as_allowed(config, trainings, study, tmp_path):
    trainings.best, trainings.real = 5.0, ()
    folder = tmp_path / "results"
    words = ["samples_to_target", config, *GRID, "--batches", "8,16,64,128", "--samples", 800, "--output", folder]
    code, _, error = study(*words, "--extensions", 1)
    assert code == 0, error
    factors = {(row["batch"], float(row["factor"])) for row in table(folder / "training.csv")}
    assert {factor for _, factor in factors} == {0.5, 1, 2, 4} and len(factors) == 16
    trainings.names.clear()
    assert study(*words, "--extensions", 3)[0] == 0
    # 4 is still at the edge; 8 is not the best, so that 16 is not tried.
    assert sorted(trainings.names) == sorted(f"b{batch}_f8_s{seed}" for batch in (8, 16, 64, 128) for seed in (0, 1))


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--batches", "8,32,64"], "the configuration's 16 among them"),
        (["--batches", "8,16"], "give 3 sizes at least"),
        (["--factors", "0.5,2,4"], "--factors: give 3 at least, 1 among them"),
        (["--factors", "0,1,2"], "must be positive"),
        (["--factors", "a,1,2"], "invalid numbers value"),
        (["--seeds", "1"], "--seeds: intervals need 2 seeds at least"),
        (["--set", "validation.targets=[]"], "validation.targets: "),
        (["--set", "lr_scheduler.decay_type=cosine"], "depends on the length of a run"),
        (["--processes", "2", "--batches", "5,16,32"], "5 images cannot be divided among 2 processes"),
    ],
)
def test_what_has_no_answer_is_refused_in_one_line(config, study, tmp_path, words, reason):
    code, _, error = study("samples_to_target", config, *GRID, "--samples", 800, "--output", tmp_path / "none", *words)
    assert code == 2 and reason in error and len(error.strip().splitlines()) == 1, error
    assert not (tmp_path / "none").exists()


def test_command_of_the_page_is_accepted():
    page = (ROOT / "docs" / "critical_batch.md").read_text()
    commands = re.findall(r"^    \.venv/bin/python scripts/study\.py (samples_to_target.*)$", page, re.MULTILINE)
    assert [command.split()[0] for command in commands] == ["samples_to_target", *["samples_to_target_report"] * 2]
    arguments, *_ = (load_tool("study").parse_arguments(shlex.split(command)) for command in commands)
    base = read_base(argparse.Namespace(**vars(arguments) | {"config": ROOT / arguments.config}))
    assert len(base.validation.targets) == 12 and base.training.global_batch_size in arguments.batches
    assert len(plan_runs(arguments, base, dict.fromkeys(arguments.batches, arguments.factors))) == 150
