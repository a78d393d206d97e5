"""Which runs of a grid are trained again: what is in their folders decides, not the table alone."""

import json
import shutil
from pathlib import Path

import pytest

from research.equal_samples import study_base
from research.grid_options import read_base
from research.training_grid import GridRun, TrainingGrid, plan_grid, train_grid
from torchtitan.config.job import load_config
from torchtitan.experiments import training
from torchtitan.experiments.folder import StudyError
from torchtitan.experiments.outcome import Outcome
from torchtitan.settings.record import dump_config

STEPS = 4


class Trainings:
    """In the place of `run_processes`: leaves a configuration and the last checkpoint's folder."""

    def __init__(self) -> None:
        self.learning_rates: list[float] = []
        self.fail = False
        self.saved = 0  # steps that a batch has saved by growing

    def __call__(self, arguments, *, processes, **options) -> Outcome:
        config = load_config(arguments, processes)
        self.learning_rates.append(config.optimizer.lr)
        if self.fail:
            return Outcome("failed", "made to fail", 0.1)
        folder = Path(config.job.dump_folder) / config.job.name
        checkpoint = folder / "checkpoint" / f"step-{config.training.steps - self.saved:08d}"
        checkpoint.mkdir(parents=True, exist_ok=True)
        (checkpoint / "state.json").write_text(json.dumps({"progress": config.training.steps}))
        (folder / "config.toml").write_text(dump_config(config))
        return Outcome("ok", "", 0.1)


@pytest.fixture
def trainings(monkeypatch) -> Trainings:
    found = Trainings()
    monkeypatch.setattr(training, "run_processes", found)
    return found


def plan(folder: Path, lr: float) -> TrainingGrid:
    base = study_base(load_config([f"--training.steps={STEPS}", f"--checkpoint.interval={STEPS}"], 1))
    return plan_grid(base, [GridRun("run", {"optimizer.lr": lr})], folder, 1)


def test_a_finished_run_whose_batch_grew_is_not_trained_again(trainings, tmp_path):
    ramp = {"training.double_batch_after": [64], "optimizer.lr": 1e-3}
    base = study_base(load_config([f"--training.steps={STEPS}", f"--checkpoint.interval={STEPS}"], 1))
    trainings.saved = 1
    for _ in range(2):
        train_grid(plan_grid(base, [GridRun("run", ramp)], tmp_path, 1))
    assert trainings.learning_rates == [1e-3]
    (tmp_path / "runs" / "run" / "checkpoint" / "step-00000003" / "state.json").write_text('{"progress": 2}')
    train_grid(plan_grid(base, [GridRun("run", ramp)], tmp_path, 1))
    assert trainings.learning_rates == [1e-3, 1e-3]


def test_a_run_without_its_last_checkpoint_is_trained_again(trainings, tmp_path):
    assert train_grid(plan(tmp_path, 1e-3)) == {}
    assert train_grid(plan(tmp_path, 1e-3)) == {} and trainings.learning_rates == [1e-3]
    with pytest.raises(StudyError, match=r"holds another run, optimizer.lr: 0.001 -> 0.002"):
        plan(tmp_path, 2e-3)
    shutil.rmtree(tmp_path / "runs")  # training.csv still says that it was trained, at another learning rate
    train_grid(plan(tmp_path, 2e-3))
    train_grid(plan(tmp_path, 2e-3))
    assert trainings.learning_rates == [1e-3, 2e-3]
    shutil.rmtree(tmp_path / "runs" / "run" / "checkpoint")
    train_grid(plan(tmp_path, 2e-3))
    assert trainings.learning_rates == [1e-3, 2e-3, 2e-3]


def test_checkpoints_of_an_unknown_configuration_are_refused(trainings, tmp_path):
    train_grid(plan(tmp_path, 1e-3))
    (tmp_path / "runs" / "run" / "config.toml").unlink()
    with pytest.raises(StudyError, match="holds checkpoints without a config.toml"):
        plan(tmp_path, 1e-3)


def test_a_failure_counts_for_what_was_asked(trainings, tmp_path):
    trainings.fail = True
    assert train_grid(plan(tmp_path, 1e-3)) == {"run": "made to fail"}
    assert train_grid(plan(tmp_path, 1e-3)) == {"run": "made to fail"} and trainings.learning_rates == [1e-3]
    trainings.fail = False
    assert train_grid(plan(tmp_path, 2e-3)) == {}
    assert train_grid(plan(tmp_path, 2e-3)) == {} and trainings.learning_rates == [1e-3, 2e-3]


@pytest.mark.parametrize("pair", ["job.dump_folder=/elsewhere", "job.name=other", "checkpoint.folder=/elsewhere"])
def test_a_study_refuses_places_of_its_runs(tmp_path, pair):
    config = tmp_path / "base.toml"
    config.write_text('[model]\nflavor = "debug"\n')
    arguments = type("Arguments", (), {"config": config, "set": [pair], "processes": 1})
    with pytest.raises(StudyError, match=f"--set: {pair.partition('=')[0]}: every run has a separate folder"):
        read_base(arguments)


def test_no_run_of_a_grid_writes_outside_of_the_study(tmp_path):
    base = study_base(load_config(["--training.steps=4", "--checkpoint.interval=4"], 1))
    elsewhere = GridRun("run", {"checkpoint.folder": str(tmp_path)})
    with pytest.raises(StudyError, match="run: checkpoint.folder: every run writes into a separate folder"):
        plan_grid(base, [elsewhere], tmp_path / "study", 1)
