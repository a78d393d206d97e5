"""Sections that a name chooses, one inside another: what is given, recorded, refused, and how one is added."""

import subprocess
import sys
import tomllib
from dataclasses import dataclass

import pytest
import torch

from tests.configurations import load, problems
from tests.launcher import ROOT
from torchtitan.autoencoders import AUTOENCODERS
from torchtitan.config.job import help_text, json_schema
from torchtitan.data import DATASETS
from torchtitan.diffusion.objectives import OBJECTIVES, build_objective
from torchtitan.diffusion.solvers import SOLVERS
from torchtitan.diffusion.timesteps.registry import DENSITIES, TIMESTEPS
from torchtitan.diffusion.timesteps.sampler import GlobalBatch, LogitNormal, TimestepsConfig
from torchtitan.fidelity.metrics import METRICS
from torchtitan.models import MODELS
from torchtitan.settings import Registry, setting
from torchtitan.settings.record import config_differences, dump_config

pytestmark = pytest.mark.usefixtures("in_empty_folder")

LAPLACE = """
[objective]
name = "consistency"
[objective.timesteps]
name = "laplace"
scale = 0.75
"""


@pytest.mark.parametrize("name", list(TIMESTEPS))
def test_every_choice_goes_round_by_its_record(name):
    path = "rectified_flow" if name == "slots" else "ddpm_linear"
    edges = ["--objective.timesteps.edges=[0, 0.5, 1]"] if name == "slots" else []
    config = load("", [f"--objective.timesteps.name={name}", f"--objective.path={path}", *edges])
    text = dump_config(config)
    assert config.objective.timesteps.name == tomllib.loads(text)["objective"]["timesteps"]["name"] == name
    assert load(text) == config and config_differences(tomllib.loads(text), config) == []


def test_an_inner_section_of_an_inner_section_is_read_recorded_and_overridden():
    config = load(LAPLACE, ["--objective.timesteps.mean=0.5"])
    timesteps = config.objective.timesteps
    assert (config.objective.name, timesteps.name, timesteps.scale, timesteps.mean) == ("consistency", "laplace", 0.75, 0.5)
    table = tomllib.loads(dump_config(config))["objective"]["timesteps"]
    assert table == {"name": "laplace", "mean": 0.5, "scale": 0.75}
    assert config_differences(config, load(LAPLACE)) == ["objective.timesteps.mean: 0.5 -> 0.0"]


def test_the_command_line_replaces_a_choice_with_its_keys():
    assert load(LAPLACE, ["--objective.timesteps.name=uniform"]).objective.timesteps == TIMESTEPS["uniform"](name="uniform")
    warped = "[objective.timesteps]\nname = 'time_warping'\nhalf_life = 500"
    assert load(warped, ["--objective.timesteps.name=adaptive_log_snr"]).objective.timesteps.half_life == 500  # a key of both


@pytest.mark.parametrize(
    ("toml", "arguments", "line"),
    [
        (
            "[objective.timesteps]\nname = 'laplace'\na = 1.5", [],
            "run.toml: objective.timesteps.a: unknown key (it is a key of objective.timesteps.name = beta)",
        ),
        (
            LAPLACE, ["--objective.timesteps.std=1"],
            "command line: --objective.timesteps.std: unknown key (it is a key of objective.timesteps.name = logit_normal)",
        ),
        (
            "", ["--objective.timesteps=mode"],
            "command line: --objective.timesteps: unknown key (it is a section; --objective.timesteps.name chooses its keys)",
        ),
        (
            "[objective]\ntimesteps = 'mode'", [],
            "run.toml: objective.timesteps: must be a table, is 'mode' (write [objective.timesteps] and its keys)",
        ),
        (
            "[ema.tracks]\nname = 'slow'\ndecay = 0.9", [],
            "run.toml: ema.tracks: must be a list of tables, is one table (write [[ema.tracks]])",
        ),
    ],
)  # fmt: skip
def test_keys_of_what_is_not_chosen_are_refused_in_one_line(toml, arguments, line):
    assert problems(toml, arguments) == [line]


def test_a_name_that_is_none_hides_the_keys_that_it_would_choose():
    (line,) = problems("[objective.timesteps]\nname = 'mod'\nscale = 1\nanything = 2")
    assert line.startswith("run.toml: objective.timesteps.name: must be one of uniform, ")


def test_a_density_is_added_by_one_class_and_one_line(monkeypatch):
    @dataclass(kw_only=True)
    class NarrowConfig(TimestepsConfig):
        """Around one time."""

        centre: float = setting(0.5, "time that all are near", gt=0, lt=1)
        light_tailed = True

        def density(self, path):
            return LogitNormal(torch.logit(torch.tensor(self.centre, dtype=torch.float64)).item(), 0.01)

    monkeypatch.setitem(DENSITIES, "narrow", NarrowConfig)
    config = load("[objective.timesteps]\nname = 'narrow'\ncentre = 0.3")
    t, _ = build_objective(config.objective, 0).timestep_sampler.sample(GlobalBatch(0, 100), torch.arange(100))
    assert (t - 0.3).abs().max() < 0.02
    assert load(dump_config(config)) == config
    assert problems("[objective.timesteps]\ncentre = 0.3") == [
        "run.toml: objective.timesteps.centre: unknown key (it is a key of objective.timesteps.name = narrow)"
    ]
    assert "--objective.timesteps.centre" in help_text(["objective.timesteps"]) and "NarrowConfig" in str(json_schema())


@pytest.mark.parametrize("registry", [AUTOENCODERS, DATASETS, METRICS, MODELS, OBJECTIVES, SOLVERS, TIMESTEPS], ids=len)
def test_every_name_of_a_registry_has_its_entry(registry):
    assert all(registry.values())


def test_an_entry_is_imported_when_it_is_read_and_not_by_its_name():
    registry = Registry("tests", {"absent": "absent.Entry"})
    registry["added"] = 1
    assert list(registry) == ["absent", "added"] and "absent" in registry and registry["added"] == 1
    with pytest.raises(ModuleNotFoundError):
        registry["absent"]
    loaded = "import sys, torchtitan.config.job; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", loaded], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert not {"torchtitan.models.flux", "torchtitan.data.cifar", "torchtitan.latents"} & set(modules)


SOLVED = """
[sampling]
num_steps = 7
[sampling.solver]
name = "edm_heun"
churn = 2
churn_min = 1
[sampling.schedule]
name = "edm"
"""


def test_how_samples_are_drawn_does_not_change_what_is_learned():
    assert config_differences(load(SOLVED), load("")) == []


def test_a_key_within_a_choice_may_depend_on_another_one():
    assert problems(SOLVED.replace("churn = 2", "churn = 0")) == [
        "run.toml: sampling.solver.churn_min: has no effect when sampling.solver.churn = 0.0; remove it or set"
        " sampling.solver.churn above 0"
    ]
