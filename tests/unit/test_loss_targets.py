"""Targets of held-out losses: their crossing, their record, what is refused, and a run that ends at them."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch

from tests.configurations import load, problems
from torchtitan.checkpoint.checkpointer import checkpoint_path, read_state
from torchtitan.config.job import load_config
from torchtitan.evaluation.config import LossTargetConfig, ValidationConfig
from torchtitan.evaluation.loss_targets import all_reached, crossed_at, follow_targets
from torchtitan.runs.folder import RunFolder
from torchtitan.trainer import Trainer


def test_crossing_of_a_power_law_is_exact_between_any_two_validations():
    """loss = 3 n^-0.4 comes down to 0.2 at n = (3 / 0.2)^(1 / 0.4)."""
    wanted = 15**2.5
    for start, end in ((10, 1000), (800, 900), (wanted, 1e4)):
        before, after = ((n, 3 * n**-0.4) for n in (start, end))
        if start < wanted:
            assert crossed_at(before, after, 0.2) == pytest.approx(wanted, rel=64 * 2.0**-52)  # logs below 8, near to 900 / 800
    assert crossed_at((100, 0.5), (200, 0.2), 0.2) == pytest.approx(200)
    for before, after in (((0, 1.0), (5, 0.1)), ((5, 0.2), (9, 0.1)), ((5, math.nan), (9, 0.1)), ((5, 1.0), (9, -0.1))):
        assert crossed_at(before, after, 0.2) is None  # there is no line above and through the target


def test_the_first_crossing_counts_and_one_before_the_first_validation_is_an_upper_end():
    easy, hard = LossTargetConfig(loss="loss", value=1.0), LossTargetConfig(loss="excess_loss_by_bin/1", value=0.1)
    config = ValidationConfig(enable=True, targets=[easy, hard], stop_at_targets=True)
    results: dict = {}
    for step, (loss, excess) in enumerate([(0.9, 0.4), (1.2, 0.2), (0.8, 0.05), (0.7, 0.2)], 1):
        losses = {"validation_metrics/loss": loss, "validation_metrics/excess_loss_by_bin/1": excess}
        results |= follow_targets(config, results, losses, step, 100 * step) | losses
        assert all_reached(config, results) == (step >= 3)
    first, second = results["targets"]["loss <= 1"], results["targets"]["excess_loss_by_bin/1 <= 0.1"]
    assert first == {"n_images_seen": 100, "step": 1, "interpolated": 0}
    assert second == {"n_images_seen": pytest.approx(200 * 1.5**0.5), "step": 3, "interpolated": 1}
    assert not all_reached(ValidationConfig(enable=True, targets=[easy, hard]), results)  # nothing is to be ended


REFUSED = {
    "unknown": (
        '{loss = "excess_loss_by_bin/10", value = 0.1}', "[0].loss: 'excess_loss_by_bin/10' is no loss of this validation"
    ),
    "time": (
        '{loss = "loss_by_time/0"}', "[0].loss: 'loss_by_time/0' is no loss of this validation (there are: loss, "
        "excess_loss, and of each _by_bin/0 .. _by_bin/9; of averages after ema/)"
    ),
    "track": ('{loss = "none/loss"}', "[0].loss: 'none/loss' is no loss of this validation"),
    "few": ('{loss = "loss_by_bin/3"}', "[0].loss: loss_by_bin/3 has no image where validation.num_images = 5 (give 10 or more)"),
    "twice": ('{loss = "loss"}, {loss = "loss", value = 0.1}', "[1].value: loss <= 0.1 is given twice (leave it out once)"),
    "value": ('{loss = "loss", value = 0.0}', "[0].value: must be above 0"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_target_that_means_nothing_is_refused(case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    targets, wanted = REFUSED[case]
    found = problems(f"[validation]\nenable = true\nnum_images = 5\nexcess_images = 20\ntargets = [{targets}]")
    assert len(found) == 1 and found[0].startswith(f"run.toml: validation.targets{wanted}")


def test_targets_need_what_they_are_of(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (found,) = problems('[validation]\nenable = true\ntargets = [{loss = "ema/excess_loss"}]')
    assert "[0].loss: ema/excess_loss is not measured (set validation.excess_images above 0)" in found
    (found,) = problems("[validation]\nenable = true\nstop_at_targets = true")
    assert "validation.stop_at_targets: has no effect when validation.targets = []" in found
    (found,) = problems('[validation]\ntargets = [{loss = "loss"}]')
    assert "validation.targets: has no effect when validation.enable = false" in found
    assert load('[validation]\nenable = true\ntargets = [{loss = "ema/loss_by_bin/9"}]').validation.targets[0].value == 0.1


# ---------------------------------------------------------------------- runs

SMALL = """
[model]
flavor = "debug"
num_layers = 1
dim = 16
mlp_hidden_dim = 16
[data]
name = "digits"
[optimizer]
lr = 1e-2
[lr_scheduler]
warmup_steps = 0
decay_type = "constant"
[training]
steps = 12
global_batch_size = 8
local_batch_size = 8
[ema]
tracks = []
[checkpoint]
interval = 2
keep_latest_k = 0
[sampling]
enable = false
[metrics]
log_freq = 4
enable_tensorboard = false
[validation]
enable = true
interval = 3
num_images = 40
"""


def train(folder: Path, name: str, targets: list[float], steps: int = 12, stop: bool = True) -> tuple[Trainer, dict]:
    (folder / "run.toml").write_text(SMALL)
    listed = json.dumps([{"loss": "loss", "value": value} for value in targets])
    words = [f"--job.dump_folder={folder}", f"--job.name={name}", f"--training.steps={steps}"]
    words += [f"--validation.targets={listed}", f"--validation.stop_at_targets={str(stop).lower()}"] if targets else []
    trainer = Trainer(load_config(["--job.config_file", str(folder / "run.toml"), *words], 1))
    try:
        trainer.train()
    finally:
        trainer.close()
    return trainer, json.loads((folder / name / "summary.json").read_text())


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in trainer.state.tensors().items()}


def losses(folder: Path) -> dict[int, float]:
    points = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {point["step"]: point["validation_metrics/loss"] for point in points if "validation_metrics/loss" in point}


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A run to its last step, with the checkpoint of every second one."""
    folder = tmp_path_factory.mktemp("targets")
    train(folder, "whole", [])
    return folder


def test_a_run_that_ends_at_its_targets_is_the_beginning_of_one_that_does_not(whole):
    """Ended at step 6; interrupted at a checkpoint before, it ends there as well, and with the same record."""
    found = losses(whole / "whole")
    assert list(found) == [3, 6, 9, 12] and found[3] > found[6] > found[9]
    target = found[6] + 0.3 * (found[3] - found[6])
    ended, summary = train(whole, "ended", [target])
    assert (summary["status"], summary["step"], summary["n_images_seen"]) == ("completed", 6, 48)
    points = map(json.loads, (whole / "ended" / "metrics.jsonl").read_text().splitlines())
    assert 6 in [point["step"] for point in points if "loss_metrics/global_avg_loss" in point]  # logged every 4 steps otherwise
    (crossing,) = summary["targets"].values()
    assert crossing["n_images_seen"] == crossed_at((24, found[3]), (48, found[6]), target)
    state, tensors = read_state(checkpoint_path(whole / "whole" / "checkpoint", 6)), weights(ended)
    resumed_from = shutil.copytree(whole / "ended", whole / "killed")
    shutil.rmtree(resumed_from / "checkpoint" / "step-00000006")
    (resumed_from / "summary.json").unlink()
    resumed, again = train(whole, "killed", [target])
    assert again["targets"] == summary["targets"] and again["step"] == 6
    reference, _ = train(whole, "reference", [], steps=6)
    for name, value in weights(reference).items():
        assert torch.equal(value, tensors[name]) and torch.equal(value, weights(resumed)[name]), name
    assert state["data"] == read_state(checkpoint_path(whole / "ended" / "checkpoint", 6))["data"]


def test_a_run_at_its_targets_is_finished_until_it_is_given_another(whole):
    found = losses(whole / "whole")
    between = [found[step] + 1e-3 * (found[step - 3] - found[step]) for step in (6, 9)]
    trainer, _ = train(whole, "twice", between[:1])
    assert RunFolder(trainer.config).is_finished()
    trainer, summary = train(whole, "twice", between)  # continues from step 6
    assert summary["step"] == 9 and len(summary["targets"]) == 2 and RunFolder(trainer.config).is_finished()
    assert losses(whole / "twice") == {step: found[step] for step in (3, 6, 9)}
    (whole / "twice" / "summary.json").unlink()  # as if it was killed after its last checkpoint
    _, again = train(whole, "twice", between)
    assert again["step"] == 9 and again["targets"] == summary["targets"]


def test_targets_alone_are_recorded_and_end_nothing(whole):
    found = losses(whole / "whole")
    _, summary = train(whole, "recorded", [found[6] * 1.0001, 1e-6], stop=False)
    assert summary["step"] == 12 and [entry["step"] for entry in summary["targets"].values()] == [6]


def test_a_target_given_on_resume_is_interpolated_from_the_validation_before(whole):
    """Trained to step 9 without a target, then to step 12 with one between the losses of steps 9 and 12."""
    found = losses(whole / "whole")
    target = found[12] + 0.5 * (found[9] - found[12])
    train(whole, "later", [], steps=9)
    _, summary = train(whole, "later", [target], stop=False)
    ((crossing),) = summary["targets"].values()
    assert crossing["interpolated"] == 1
    assert crossing["n_images_seen"] == crossed_at((72, found[9]), (96, found[12]), target)
