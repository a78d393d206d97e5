"""Weights & Biases is given the project of the environment, and the run's results for its summary."""

from types import ModuleType

import pytest

from torchtitan.training.metric_sinks import WandbRun


class Run:
    def __init__(self, **options):
        self.options, self.summary, self.logged = options, {}, []

    def log(self, metrics, step):
        self.logged.append((step, metrics))


@pytest.fixture
def service(monkeypatch):
    module = ModuleType("wandb")
    module.Error = type("Error", (Exception,), {})
    module.init = lambda **options: Run(**options)
    monkeypatch.setitem(__import__("sys").modules, "wandb", module)
    return module


@pytest.mark.parametrize(("environment", "project"), [({}, "torchtitan"), ({"WANDB_PROJECT": "mine"}, "mine"),
                                                      ({"WANDB_PROJECT": ""}, "torchtitan")])  # fmt: skip
def test_the_project_is_that_of_the_environment(service, tmp_path, monkeypatch, environment, project):
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    run = WandbRun(tmp_path, "x", {})
    assert run._run.options["project"] == project
    run.summarise({"sample_accuracy": 0.9, "status": "completed"})
    assert run._run.summary == {"sample_accuracy": 0.9, "status": "completed"}
