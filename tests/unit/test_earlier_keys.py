"""Keys that earlier versions had elsewhere: every one still loads, said once, and never beside the present ones."""

import dataclasses
import json
import tomllib
from pathlib import Path

import pytest
import tomli_w

from torchtitan.config.job import ConfigError, JobConfig, config_differences, dump_config, load_config
from torchtitan.settings import earlier_keys
from torchtitan.settings.earlier_keys import MOVED, with_present_keys
from torchtitan.settings.schema import default_of
from torchtitan.settings.sections import choices, section_at

EARLIER_RUN = Path(__file__).parents[1] / "fixtures" / "earlier" / "run" / "config.toml"
# Values that differ from the defaults, where one more than the default will not do.
OTHER_VALUES = {
    "edges": [0.0, 0.3, 1.0],
    "edges_path": "edges.json",
    "towards": "data",
    "scale": 1.5,
    "eta": 0.5,
    "variance": "large",
    "diffusion": "constant",
    "churn_min": 1.0,
    "snr": [1.0],
}
CHOOSERS = {move.sections[0]: key for key, move in MOVED.items() if move.key == "name"}
KEYS = [(key, section, name) for key, move in MOVED.items() for section in move.sections for name in move.names]


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("edges.json").write_text('{"unit": "t", "edges": [0, 0.4, 1]}')
    earlier_keys._print_once.cache_clear()


def load(tables: dict, arguments: list[str] | None = None) -> JobConfig:
    Path("run.toml").write_text(tomli_w.dumps(tables), encoding="utf-8")
    config = load_config(["--job.config_file", "run.toml", *(arguments or [])], 1)
    return dataclasses.replace(config, job=dataclasses.replace(JobConfig().job, name="run"))


def options_of(section: str):
    """The choice of a section, wherever another one must be chosen for it to be there."""
    outer, _, last = section.rpartition(".")
    if outer.count("."):
        registry = options_of(outer).registry
        return next(choices(each())[last] for each in registry.values() if last in choices(each()))
    return choices(section_at(JobConfig(), outer))[last]


def other_value(section: str, name: str, key: str):
    default = default_of(options_of(section).section(name).__dataclass_fields__[key])
    if key in OTHER_VALUES:
        return OTHER_VALUES[key]
    return not default if isinstance(default, bool) else default + 1.0


def earlier_and_present(key: str, section: str, name: str) -> tuple[dict, dict]:
    """Flat keys that choose a name and set one of its keys, as earlier versions and as this one has them."""
    value, move = other_value(section, name, MOVED[key].key), MOVED[key]
    earlier, present = {CHOOSERS[section]: name, key: value}, {f"{section}.name": name, f"{section}.{move.key}": value}
    if section == "objective.timesteps.base":
        earlier, present = ({flat: "adaptive_log_snr", **rest} for flat, rest in (
            ("objective.timestep_sampler", earlier), ("objective.timesteps.name", present)
        ))  # fmt: skip
    if name == "slots" and move.key == "importance":
        earlier["objective.slot_edges"] = present["objective.timesteps.edges"] = OTHER_VALUES["edges"]
    if key.startswith("sampling.churn_"):
        earlier["sampling.churn"] = present["sampling.solver.churn"] = 3.0
    if name == "edm_heun":
        earlier["sampling.schedule"] = present["sampling.schedule.name"] = "edm"
    if section == "objective.combine":
        earlier["objective.heads"] = present["objective.heads"] = ["x0", "v"]
    if name == "speed":
        earlier["objective.path"] = present["objective.path"] = "ddpm_linear"
    return earlier, present


def nested(flat: dict) -> dict:
    tables: dict = {}
    for dotted, value in flat.items():
        *outer, last = dotted.split(".")
        place = tables
        for part in outer:
            place = place.setdefault(part, {})
        place[last] = value
    return tables


def arguments_of(flat: dict) -> list[str]:
    return [f"--{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in flat.items()]


@pytest.mark.parametrize(("key", "section", "name"), KEYS)
def test_every_earlier_key_loads_as_the_present_one(key, section, name, capsys):
    earlier, present = earlier_and_present(key, section, name)
    wanted = load(nested(present))
    found = section_at(wanted, section)
    changed = "edges" if MOVED[key].key == "edges_path" else MOVED[key].key  # the file's edges are recorded
    assert getattr(found, changed) != default_of(found.__dataclass_fields__[changed])
    assert capsys.readouterr().err == ""
    assert load(nested(earlier)) == wanted
    assert load({}, arguments_of(earlier)) == wanted
    assert load(nested({CHOOSERS[section]: name} | earlier), arguments_of({key: earlier[key]})) == wanted
    assert with_present_keys(nested(earlier)) == nested(present)


@pytest.mark.parametrize("section", CHOOSERS)
def test_every_name_of_earlier_versions_is_one_still(section):
    for name in {name for move in MOVED.values() for name in move.names if section in move.sections}:
        assert name in options_of(section).registry


def test_the_configuration_of_an_earlier_run_is_the_present_one():
    old = tomllib.loads(EARLIER_RUN.read_text())
    config = load(old)
    assert config_differences(old, config) == []
    assert config_differences(old, load(tomllib.loads(dump_config(config)))) == []
    other = load(old, ["--objective.timesteps.mean=0.5"])
    assert config_differences(old, other) == ["objective.timesteps.mean: 0.0 -> 0.5"]
    old["objective"] |= {"timestep_sampler": "laplace", "laplace_mean": 0.5, "laplace_scale": 0.5}
    assert config_differences(old, other) == [
        "objective.timesteps.name: laplace -> logit_normal", "objective.timesteps.mean: 0.0 -> 0.5"
    ]  # fmt: skip


def test_a_file_and_a_command_line_are_told_once_what_has_moved(capsys):
    old = {"objective": {"timestep_sampler": "laplace", "laplace_mean": 0.5, "shift": 2.0}}
    for _ in range(2):
        load(old, ["--objective.laplace_scale", "2"])
    assert capsys.readouterr().err.splitlines() == [
        "run.toml: objective.timestep_sampler is now objective.timesteps.name (mapped 2 keys)",
        "command line: --objective.laplace_scale is now --objective.timesteps.scale (mapped 1 key)",
    ]


def test_only_the_first_rank_says_it(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    load({"objective": {"timestep_sampler": "uniform"}})
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("tables", "arguments", "line"),
    [
        (
            {"objective": {"timestep_sampler": "mode", "mode_scale": 1.0, "timesteps": {"name": "mode"}}}, [],
            "run.toml: objective.timestep_sampler: is now objective.timesteps.name, and objective.timesteps is given too"
            " (write the present key alone)",
        ),
        (
            {}, ["--objective.timesteps.name=mode", "--objective.mode_scale=1"],
            "command line: --objective.mode_scale: is now objective.timesteps.scale, and objective.timesteps is given too"
            " (write the present key alone)",
        ),
        (
            {"objective": {"timestep_sampler": "uniform", "logit_std": 2.0}}, [],
            "run.toml: objective.logit_std: unknown key (it is now objective.timesteps.std with objective.timesteps.name ="
            " logit_normal)",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_one_line(tables, arguments, line):
    with pytest.raises(ConfigError) as caught:
        load(tables, arguments)
    assert caught.value.problems == [line]


def test_an_earlier_key_hides_no_value_in_the_place_of_its_table():
    with pytest.raises(ConfigError) as caught:
        load({"objective": {"timesteps": "mode", "logit_mean": 0.5, "base_density": "mode"}})
    assert sorted(problem.split(": ")[1:3] for problem in caught.value.problems) == [
        ["objective.base_density", "unknown key (it is now objective.timesteps.base.name)"],
        [
            "objective.logit_mean",
            "unknown key (it is now objective.timesteps.mean with objective.timesteps.name = logit_normal)",
        ],
        ["objective.timesteps", "must be a table, is 'mode' (write [objective.timesteps] and its keys)"],
    ]


def test_either_form_overrules_the_other_from_the_command_line():
    old = {"objective": {"timestep_sampler": "laplace", "laplace_scale": 2.0}}
    new = {"objective": {"timesteps": {"name": "laplace", "scale": 2.0}}}
    for tables in (old, new):
        assert load(tables, ["--objective.laplace_mean=1"]) == load(tables, ["--objective.timesteps.mean=1"])
        replaced = [load(tables, [f"--objective.{key}=mode"]) for key in ("timestep_sampler", "timesteps.name")]
        assert replaced[0] == replaced[1] and replaced[0].objective.timesteps.scale == 1.29  # not the laplace's
