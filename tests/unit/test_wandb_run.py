"""Weights & Biases is given the project of the environment, and the run's results for its summary; without it a run trains."""

import sys
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
    monkeypatch.setitem(sys.modules, "wandb", module)
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


class Terminal:
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("error", ["Error", "ValueError"])
def test_without_a_login_nobody_is_asked_and_one_line_says_so(service, tmp_path, monkeypatch, caplog, error):
    """wandb asks at a terminal for a key, and raises an error where there is none; bad values of its variables are errors too."""
    asked, terminal = [], Terminal()

    def init(**options):
        asked.append(sys.stdin.isatty())
        raise getattr(service, error, ValueError)("No API key configured.\nUse `wandb login` to log in.")

    service.init = init
    monkeypatch.setattr(sys, "stdin", terminal)
    run = WandbRun(tmp_path, "x", {})
    assert asked == [False] and sys.stdin is terminal
    (line,) = caplog.messages
    assert "No API key configured" in line and "training continues, and this session is not logged there" in line
    assert "\n" not in line
    run.log(1, {"loss": 1.0})
    run.summarise({"status": "completed"})
    run.close()
    assert len(caplog.messages) == 1
