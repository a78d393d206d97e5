"""What describes the configuration (JSON schema, `--help`, documentation) agrees with what `load_config` does."""

import dataclasses
import json
import tomllib

import pytest

from tests.configurations import load
from tests.forked import ROOT, run_script
from tests.unit.test_config import every_section, without_file
from torchtitan.config.job import ConfigError, JobConfig, help_text, json_schema, load_config
from torchtitan.data import DATASETS
from torchtitan.settings.record import dump_config
from torchtitan.settings.sections import keys
from torchtitan_dit.commands import train

pytestmark = pytest.mark.usefixtures("in_empty_folder")


def schema_errors(value, schema, root=None, place="") -> list[str]:
    """Check a TOML document against the part of JSON schema that `json_schema` uses."""
    root = root or schema
    if "$ref" in schema:
        return schema_errors(value, root["$defs"][schema["$ref"].rsplit("/", 1)[1]], root, place)
    if "anyOf" in schema:
        attempts = [schema_errors(value, option, root, place) for option in schema["anyOf"]]
        return min(attempts, key=len)
    errors = []
    kinds = {"object": dict, "array": list, "string": str, "integer": int, "number": (int, float), "boolean": bool}
    wanted = schema.get("type")
    if (
        wanted == "null"
        or wanted
        and (not isinstance(value, kinds[wanted]) or isinstance(value, bool) > (wanted == "boolean"))
    ):
        return [f"{place} is not of type {wanted}"]
    if "const" in schema and value != schema["const"] or "enum" in schema and value not in schema["enum"]:
        errors.append(f"{place} is not allowed")
    if wanted in ("integer", "number"):
        inside = schema.get("minimum", value) <= value <= schema.get("maximum", value)
        above = "exclusiveMinimum" not in schema or value > schema["exclusiveMinimum"]
        below = "exclusiveMaximum" not in schema or value < schema["exclusiveMaximum"]
        errors += [] if inside and above and below else [f"{place} is out of range"]
    if wanted == "object":
        errors += [f"{place} lacks {key}" for key in schema.get("required", []) if key not in value]
        for key, entry in value.items():
            if key not in schema["properties"]:
                errors.append(f"{place}.{key} is unknown")
            else:
                errors += schema_errors(entry, schema["properties"][key], root, f"{place}.{key}")
    if wanted == "array":
        for index, entry in enumerate(value):
            errors += schema_errors(entry, schema["items"], root, f"{place}[{index}]")
    return errors


def test_schema_accepts_what_load_accepts_and_refuses_what_it_refuses():
    schema = json.loads(json.dumps(json_schema()))
    nested = ["--objective.name=consistency", "--objective.timesteps.name=mode"]
    for arguments in ([], nested, ["--data.name=synthetic"], ["--ema.tracks=[]", "--sampling.ema_track=none"]):
        document = tomllib.loads(dump_config(load(arguments=arguments)))
        assert schema_errors(document, schema) == []
    for document, error in [
        ({"training": {"step": 1}}, ".training.step is unknown"),
        ({"trainin": {}}, ".trainin is unknown"),
        ({"training": {"steps": 0}}, ".training.steps is out of range"),
        ({"optimizer": {"lr": 0}}, ".optimizer.lr is out of range"),
        ({"optimizer": {"lr": "1"}}, ".optimizer.lr is not of type number"),
        ({"model": {"flavor": "x"}}, ".model.flavor is not allowed"),
        ({"data": {"kind": "noise"}}, ".data.kind is unknown"),
        ({"objective": {"timesteps": {"name": "mod"}}}, ".objective.timesteps.name is not allowed"),
        ({"objective": {"timesteps": {"mean": "1"}}}, ".objective.timesteps.mean is not of type number"),
        ({"ema": {"tracks": [{"decay": 1}]}}, ".ema.tracks[0].decay is out of range"),
    ]:
        assert schema_errors(document, schema) == [error]


@pytest.mark.parametrize("path", sorted((ROOT / "train_configs").glob("*.toml")), ids=lambda path: path.name)
def test_shipped_file_fits_the_schema_and_dumps_equal(path):
    document = tomllib.loads(path.read_text(encoding="utf-8"))
    assert schema_errors(document, json_schema()) == []
    try:
        config = load_config(["--job.config_file", str(path)], 1)
    except ConfigError as error:  # data, weights and several processes may not be here; nothing else may be wrong
        assert all(
            any(key in line for key in ("data.path: ", "checkpoint.initial_weights: ", "parallelism.", "training.global_batch"))
            for line in error.problems
        )
        return
    assert without_file(load(dump_config(config))) == without_file(config)


def test_help_lists_every_section_in_a_line():
    lines = help_text().partition("Sections:\n")[2].splitlines()
    names = [line.split()[0] for line in lines]
    assert names[:7] == ["job", "model", "model.routing", "data", "cache", "autoencoder", "objective"]
    assert {section.name for section in dataclasses.fields(JobConfig)} <= set(names)
    assert all(len(line.split()) > 2 for line in lines)  # a name and what is in it
    assert f"dataset (name: one of {len(DATASETS)})" in help_text()


def test_help_of_a_section_has_every_key_with_its_description():
    found = list(every_section())
    texts = {name: " ".join(help_text([name]).split()) for name in dict(found)}
    assert {"sampling.solver", "objective.timesteps", "model", "debug"} <= set(texts)
    for name, section in found:
        for field in keys(section):
            assert f"--{name}.{field.name} " in texts[name]
            assert " ".join(field.metadata["description"].split()) in texts[name]
    timesteps = " ".join(help_text(["objective.timesteps"]).split())
    assert "--objective.timesteps.std a number, above 0 (default 1.0)" in timesteps
    assert {"objective.timesteps", "objective.weighting"} <= set(help_text(["objective"]).splitlines()[-1].split())
    assert "only with checkpoint.enable = true" in help_text(["checkpoint"])
    assert "only with objective.heads is set" in " ".join(help_text(["objective.combine"]).split())
    assert "--data.num_classes" in help_text(["data"]) and "DiT-XL/2," in help_text(["model"])


def test_help_of_one_name_of_a_section_and_of_one_key():
    webdataset = help_text(["data.webdataset"])
    assert webdataset in help_text(["data"]) + "\n" and "[data] with data.name = cifar10" not in webdataset
    assert help_text(["optimizer.lr"]) == (
        "[optimizer]\n  --optimizer.lr  a number, above 0 (default 0.0001)\n      peak learning rate\n"
    )
    assert "[data] with data.name = cifar10 or cifar100\n  --data.path" in help_text(["data.path"])
    assert help_text(["debug", "optimizer.lr"]) == f"{help_text(['debug'])}\n{help_text(['optimizer.lr'])}"


@pytest.mark.parametrize(
    ("topic", "advice"),
    [
        ("objektive", "did you mean objective?"),
        ("objective.timestep", "did you mean objective.timesteps?"),
        ("lrs", "did you mean optimizer.lr?"),
        ("weight_decay", "did you mean optimizer.weight_decay?"),
        ("training.qqqqqq", "--help training lists its keys"),
        ("qqqqqq", "--help lists the sections"),
    ],
)
def test_help_of_an_unknown_name_is_refused_in_a_line(topic, advice, capsys):
    with pytest.raises(SystemExit) as end:
        train.main(["--help", topic])
    assert (end.value.code, capsys.readouterr()) == (2, ("", f"--help {topic}: no such section or key ({advice})\n"))


def test_the_schema_is_written_for_editors(tmp_path):
    assert run_script("-m", "torchtitan.config", str(tmp_path / "schema.json")).returncode == 0
    assert json.loads((tmp_path / "schema.json").read_text()) == json_schema()
