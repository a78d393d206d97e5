"""Methods compared: changes on both axes in closed form; a study that resumes from its table alone."""

import json
import math
from pathlib import Path

import pytest

from research import compare_methods_report as report
from research.compare_methods_report import MeasuredRun, change
from tests.end_to_end.tools import table
from tests.research.small_runs import SMALL
from torchtitan.config.job import load_config
from torchtitan.experiments import training
from torchtitan.experiments.outcome import Outcome

CONFIG = """validation.enable = true
evaluation = {enable = true, metrics = ["accuracy"], extractor = "digits"}
training = {local_batch_size = 4, global_batch_size = 4}
""" + SMALL


def power_law(flops: float, factor: float = 1.0) -> MeasuredRun:
    """Loss factor / sqrt(images), and a share that grows by 0.1 with each doubling."""
    curves = {"loss": [factor * 100**-0.5, factor * 400**-0.5], "share": [0.0, 0.2]}
    return MeasuredRun(flops, [100, 400], curves)


def test_a_run_of_other_cost_is_compared_after_the_flops_of_the_cheaper_one():
    plain = power_law(2.0)
    for run, ratio in ((power_law(3.2, 0.9), 1.6), (power_law(1.6, 0.9), 0.8)):  # the costlier one is measured earlier
        assert change(run, plain, "loss", "lower", "images") == pytest.approx(math.log(0.9), abs=1e-12)
        assert change(run, plain, "loss", "lower", "FLOPs") == pytest.approx(math.log(0.9) + math.log(ratio) / 2, abs=1e-12)
        assert change(run, plain, "share", "higher", "FLOPs") == pytest.approx(-0.1 * math.log2(ratio), abs=1e-12)


def test_an_interval_is_students_and_marked_where_it_excludes_0(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "draw", lambda *of: "")
    found = {("plain", seed): power_law(1.0) for seed in (0, 1, 2)}
    found |= {("a", seed): power_law(2.0, math.exp(-0.1 + 0.01 * seed)) for seed in (0, 1)}
    images, flops = report.write(found, ["plain", "a", "b"], {"loss": "lower", "share": "higher"}, tmp_path).split("## ")[1:3]
    low, high = (100 * math.expm1(-0.095 + sign * 12.7062 * 0.005) for sign in (-1, 1))  # t(1, 97.5 %)
    assert f"| a | 2 | 2 | **{100 * math.expm1(-0.095):+.1f} % [{low:+.1f}, {high:+.1f}]** | +0.0 points" in images
    assert f"{100 * math.expm1(math.log(2) / 2 - 0.095):+.1f} %" in flops and "-10.0 points" in flops
    assert "| b | 0 | - | - | - |" in images


def test_changes_over_training_are_of_each_measurement_and_against_the_last(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "draw", lambda *of: "")
    found = {("plain", seed): power_law(1.0) for seed in (0, 1)}
    late = {seed: MeasuredRun(1.0, [100, 400], {"loss": [0.1 * math.exp(0.3 + 0.01 * seed), 0.05 * 1.1]}) for seed in (0, 1)}
    found |= {("late", seed): run for seed, run in late.items()}
    text = report.write(found, ["plain", "late"], {"loss": "lower"}, tmp_path).split("## Loss over training")[1]
    half = 12.7062 * 0.005  # t(1, 97.5 %)
    low, high = (100 * math.expm1(0.305 - math.log(1.1) + sign * half) for sign in (-1, 1))
    against_end = f"{100 * math.expm1(0.305) / 1.1 - 100 * 0.1 / 1.1:+.1f} % [{low:+.1f}, {high:+.1f}]"
    assert f"| late | 100 | **{100 * math.expm1(0.305):+.1f} %" in text and f"**{against_end}** |" in text
    assert "| late | 400 | **+10.0 % [+10.0, +10.0]** | +0.0 % [+0.0, +0.0] |" in text


@pytest.fixture
def trained(monkeypatch) -> list[str]:
    """Names of the runs that were trained; each leaves what a run leaves, and plain_s1 in `first` is stopped as by Ctrl-C."""
    names: list[str] = []

    def run_processes(arguments, *, processes, **options) -> Outcome:
        config = load_config(arguments, processes)
        if config.job.name == "plain_s1" and "first" in config.job.dump_folder:
            raise KeyboardInterrupt
        names.append(config.job.name)
        (folder := Path(config.job.dump_folder) / config.job.name).mkdir(parents=True)
        (folder / "summary.json").write_text(json.dumps({"step": 4, "flops_per_image": 10 + config.model.value_residual}))
        values = {step: {"validation_metrics/ema/loss": 1 / step, "evaluation_metrics/accuracy": step / 9} for step in (2, 4)}
        lines = (json.dumps({"step": step, "n_images_seen": 4 * step} | found) + "\n" for step, found in values.items())
        (folder / "metrics.jsonl").write_text("".join(lines))
        return Outcome("ok", "", 0.1)

    monkeypatch.setattr(training, "run_processes", run_processes)
    return names


def test_a_study_resumes_in_another_folder_from_its_table(trained, study, tmp_path):
    config, methods, second = (tmp_path / name for name in ("tiny.toml", "methods.toml", "second"))
    config.write_text(CONFIG)
    methods.write_text("[plain]\n[residual]\nmodel.value_residual = true\n")
    words = ["compare_methods", config, "--methods", methods, "--seeds", "2", "--samples", "16", "--checkpoints", "2", "--output"]
    assert study(*words, tmp_path / "first")[0] == 130 and trained == ["plain_s0", "residual_s0"]
    second.mkdir()
    (second / "training.csv").write_text((tmp_path / "first" / "training.csv").read_text())
    for options, ended in (["--report-only"], "2 of 4 runs"), ([], "4 of 4 runs"):
        code, _, error = study(*words, second, *options)
        assert code == 0 and ended in (second / "summary.md").read_text(), error
    assert trained == ["plain_s0", "residual_s0", "plain_s1", "residual_s1"]
    row = table(second / "training.csv")[1]
    assert (row["flops_per_image"], row["images"]) == ("11", "8 16") and json.loads(row["curves"])["loss"] == [1 / 2, 1 / 4]
    methods.write_text("[plain]\n[residual]\nmodel.value_residual = true\n")
    code, _, error = study(*words, tmp_path / "loss", "--report-only", "--set", "evaluation.enable=false")
    assert code == 0 and "accuracy" not in (tmp_path / "loss" / "summary.md").read_text(), error
    methods.write_text("alone = 1\n")
    code, _, error = study(*words, second)
    assert code == 2 and "is no file of tables" in error and error.count("\n") == 1
