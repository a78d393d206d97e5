"""What Weights & Biases is given: the project of the environment, few tags of the noise scale, results in its summary."""

from types import ModuleType

import pytest
import torch

from torchtitan.console import _weighting
from torchtitan.gns.allocate import another_batch
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


def test_the_weighting_is_told_by_its_peak_and_the_range_above_half():
    points = torch.linspace(-6.0, 6.0, 121, dtype=torch.float64)
    assert "equal at every noise level" in _weighting(points, torch.full_like(points, 3.0))
    line = _weighting(points, torch.exp(-0.5 * points**2))  # half at ln sigma = ±1.18
    assert "highest at noise level sigma = 1, at least half of that between 0.33 and 3" in line


@pytest.mark.parametrize(("scale", "change"), [
    ((100.0, 50.0, 200.0, 128), False), ((100.0, 90.0, 110.0, 150), False), ((100.0, 90.0, 110.0, 10), True),
    ((100.0, 90.0, 110.0, 1000), True), ((0.0, 50.0, float("inf"), 20), True), ((0.0, 50.0, float("inf"), 80), False),
    ((0.0, -1.0, float("inf"), 20), False), ((0.0, float("nan"), 3.0, 20), False),
])  # fmt: skip
def test_advice_on_the_batch_is_given_only_where_it_is_to_be_changed(scale, change):
    assert another_batch(*scale) is change
