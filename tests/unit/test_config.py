"""Configuration: what wins, what is filled in, what is recorded."""

import dataclasses
import re
import tomllib
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.configurations import load, problems
from torchtitan.conditions import Classes
from torchtitan.config.job import ConfigError, JobConfig, load_config, report_and_exit
from torchtitan.data import DATASETS
from torchtitan.models import MODELS, flavor_and_changes
from torchtitan.runs.folder import RunFolder
from torchtitan.settings.record import config_differences, dump_config
from torchtitan.settings.schema import parse_text
from torchtitan.settings.sections import choices, keys, section_at

FLAVORS = [(family, flavor) for family, entry in MODELS.items() for flavor in entry.flavors]
SYNTHETIC = '[data]\nname = "synthetic"\n'
UNLABELLED = SYNTHETIC + "num_classes = 0\n"

pytestmark = pytest.mark.usefixtures("in_empty_folder")


def without_file(config: JobConfig) -> JobConfig:
    return dataclasses.replace(config, job=dataclasses.replace(config.job, config_file=""))


def every_section() -> Iterator[tuple[str, Any]]:
    """Every section with its defaults by its dotted name; one with choices once for each of them."""

    def chosen(outer: str, section: Any) -> Iterator[tuple[str, Any]]:
        for inner, options in choices(section).items():
            for made in map(options.section, options.registry):
                yield outer + inner, made
                yield from chosen(f"{outer}{inner}.", made)

    yield from chosen("", JobConfig())
    for field in dataclasses.fields(JobConfig):
        if field.name not in choices(JobConfig()):
            section = getattr(JobConfig(), field.name)
            yield field.name, section
            yield from chosen(f"{field.name}.", section)


def test_command_line_overrides_file_overrides_default():
    assert load().training.steps == 10000
    assert load("[training]\nsteps = 5").training.steps == 5
    assert load("[training]\nsteps = 5", ["--training.steps", "7"]).training.steps == 7
    assert load("[training]\nsteps = 5", ["--training.steps=7", "--training.steps=8"]).training.steps == 8


def test_flavor_is_default_of_the_model_and_its_fields_can_be_overridden():
    row = MODELS["dit"].flavors["digits"]
    config = load("[model]\nflavor = 'digits'\nnum_layers = 2", ["--model.qk_norm", "false"])
    assert config.model == dataclasses.replace(row, num_layers=2, qk_norm=False)
    assert row.num_layers != 2  # the table itself is untouched
    routed = load("[model]\nflavor = 'digits'\nqk_norm = false", ["--model.routing.name", "tread"]).model
    assert flavor_and_changes(routed) == "digits (qk_norm = false, routing = tread)"
    assert flavor_and_changes(row) == "digits"
    assert load("[model]\nflavor = 'digits'", ["--model.flavor", "debug"]).model == MODELS["dit"].flavors["debug"]


@pytest.mark.parametrize(
    "argument, value",
    [
        ("--training.steps=1e6", 1_000_000),
        ("--optimizer.lr=1", 1.0),
        ("--compile.enable=false", False),
        ("--sampling.classes=[1, 2]", [1, 2]),
        ("--sampling.classes=1,2", [1, 2]),
        ("--training.double_batch_after=300", [300]),
        ("--metrics.peak_tflops=none", None),
        ("--metrics.peak_tflops=3", 3.0),
        ("--job.dump_folder=a=b", "a=b"),
        ("--objective.timesteps.mean=-0.5", -0.5),
    ],
)
def test_command_line_value_is_read_as_the_type_of_its_key(argument, value):
    section, _, key = argument[2:].split("=")[0].rpartition(".")
    got = getattr(section_at(load(arguments=[argument]), section), key)
    assert got == value and type(got) is type(value)


def test_commas_are_between_names_but_within_prompts():
    assert parse_text("fd,kid", list[str]) == ["fd", "kid"] and parse_text("a dog, running", list[str]) == ["a dog, running"]


def test_ema_tracks_are_dataclasses_from_toml_and_from_json():
    from_toml = load("[[ema.tracks]]\nname = 'ema'\ndecay = 0.5\n[[ema.tracks]]\nname = 'slow'").ema
    from_json = load(arguments=["--ema.tracks", '[{"name": "ema", "decay": 0.5}, {"name": "slow"}]']).ema
    assert from_toml == from_json
    assert [(track.name, track.decay) for track in from_toml.tracks] == [("ema", 0.5), ("slow", 0.9999)]


def test_degrees_and_batch_are_resolved():
    config = load(arguments=["--parallelism.data_parallel_replicate_degree", "2"], world_size=6)
    assert config.parallelism.data_parallel_replicate_degree == 2
    assert config.parallelism.data_parallel_shard_degree == 3
    assert config.training.global_batch_size == 6 * 32
    copies = ["--parallelism.data_parallel_replicate_degree=-1", "--parallelism.data_parallel_shard_degree=2"]
    assert load(arguments=copies, world_size=6).parallelism.data_parallel_replicate_degree == 3


def test_data_without_classes_turns_off_dropout_and_guidance_that_nobody_asked_for():
    config = load(UNLABELLED)
    assert (config.model.label_dropout, config.sampling.guidance_scale) == (0.0, 1.0)
    assert load(SYNTHETIC).sampling.guidance_scale == 2.0
    assert load("[model]\nlabel_dropout = 0.0").sampling.guidance_scale == 1.0


def test_metrics_of_the_command_line_leave_aside_the_images_that_the_file_gives_for_others():
    words = ["digits", "--evaluation.metrics", "accuracy,fd"]
    evaluation = load(arguments=words).evaluation
    assert evaluation.held_out == "" and evaluation.reference == "train"
    assert load(dump_config(load(arguments=words))).evaluation == evaluation
    assert load(arguments=["digits", "--evaluation.metrics", "accuracy"]).evaluation.reference == ""
    given = problems(arguments=[*words, "--evaluation.held_out", "validation"])
    assert given == ["command line: --evaluation.held_out: has no effect on accuracy, fd (remove it)"]


def test_command_line_overrules_a_section_of_the_file():
    measured = "[gns]\nenable = true\ninterval = 7\nnum_bins = 3\n"
    assert load(measured).gns.interval == 7
    config = load(measured, ["--gns.enable", "false"])
    assert config.gns == JobConfig().gns
    assert without_file(load(dump_config(config), ["--job.name", "run"])) == without_file(config)
    with pytest.raises(ConfigError, match="has no effect"):  # the file contradicts itself
        load("[gns]\nenable = false\ninterval = 7\n")
    with pytest.raises(ConfigError, match="has no effect"):  # the command line does
        load(None, ["--gns.enable", "false", "--gns.interval", "7"])
    with pytest.raises(ConfigError, match="command line: --gns.interval: has no effect"):  # whatever the file says
        load(measured, ["--gns.enable", "false", "--gns.interval", "5"])


def test_command_line_replaces_the_dataset_of_the_file():
    config = load('[data]\nname = "cifar10"\npath = "nowhere"\nnum_workers = 2\n', ["--data.name", "digits"])
    assert config.data == dataclasses.replace(DATASETS["digits"].Config(), num_workers=2)
    with pytest.raises(ConfigError, match="data.paht: unknown key"):
        load('[data]\nname = "cifar10"\npaht = "nowhere"\n', ["--data.name", "digits"])


def test_run_is_named_after_its_file():
    assert load("").job.name == "run"
    assert load().job.name == "run"
    Path("small.dit.toml").write_text("")
    assert load_config(["--job.config_file", "small.dit.toml"], 1).job.name == "small.dit"
    assert load_config(["--job.config_file", "small.dit.toml", "--job.name", "other"], 1).job.name == "other"


@pytest.mark.parametrize("family, flavor", FLAVORS)
def test_dump_of_every_flavor_loads_equal(family, flavor):
    arguments = [
        f"--model.name={family}",
        f"--model.flavor={flavor}",
        "--data.name=synthetic",
        "--data.shape=[4,32,32]",
    ]
    entry = MODELS[family]
    assert entry.flavors[flavor].flavor == flavor
    if not entry.takes(Classes(10)):
        sizes = entry.flavors[flavor]
        arguments += ["--data.text_length=8", f"--data.text_dim={sizes.text_dim}", f"--data.pooled_dim={sizes.pooled_dim}"]
    config = load(arguments=arguments, world_size=2)
    assert without_file(load(dump_config(config), world_size=2)) == without_file(config)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--objective.timesteps.name=uniform", "--sampling.enable=false", "--checkpoint.enable=false"],
        ["--ema.tracks=[]", "--sampling.ema_track=none", "--metrics.peak_tflops=0.1", "--data.num_workers=2"],
        ['--ema.tracks=[{"name": "a", "decay": 1e-3}]', "--sampling.ema_track=a", '--job.name=caf\u00e9 "1"'],
        ["--data.name=synthetic", "--data.num_classes=0", "--data.kind=noise"],
        ["--model.flavor=digits", "--model.position=sincos", "--lr_scheduler.decay_type=cosine"],
    ],
)
def test_dump_of_overrides_loads_equal(arguments):
    config = load(arguments=arguments)
    assert without_file(load(dump_config(config))) == without_file(config)


def test_dump_holds_what_has_an_effect_and_starts_with_a_comment():
    text = dump_config(load("[objective]\ntimesteps.name = 'uniform'"))
    document = tomllib.loads(text)
    assert text.startswith("# ")
    sections = [field.name for field in dataclasses.fields(JobConfig)]
    assert list(document) == [name for name in sections if name != "cache"]  # of other data
    assert "config_file" not in document["job"] and "peak_tflops" not in document["metrics"]
    assert document["objective"]["timesteps"] == {"name": "uniform"}


def test_keys_declare_what_the_record_relies_on():
    """None is not written, so it must be the default; what depends on a key must be able to find it."""
    instances = [family.flavors[flavor] for family in MODELS.values() for flavor in family.flavors]
    instances += [section for _, section in every_section()]
    for instance in instances:
        hints = typing.get_type_hints(type(instance))
        for field in keys(instance):
            assert field.metadata["description"], field.name
            if types.NoneType in typing.get_args(hints[field.name]):
                assert getattr(instance, field.name) is None, field.name
            for key in (each for names in field.metadata["applies"] for each in names.split(" or ")):
                assert "." in key or key in hints, field.name
            element = (*typing.get_args(hints[field.name]), None)[0]
            if dataclasses.is_dataclass(element):
                names = {inner.name for inner in dataclasses.fields(element)}
                assert all(names >= set(inner.metadata["applies"]) for inner in dataclasses.fields(element))


def test_a_home_folder_is_expanded_in_every_path(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "home.toml").write_text("""
[job]
dump_folder = "~/outputs"
[data]
name = "synthetic"
[checkpoint]
folder = "~"
initial_weights = "~/a.safetensors"
[lora]
enable = true
extra = [{path = "~/b.safetensors"}]
""")
    config = load_config(["--config=~/home.toml", "--lora.initial_adapter=~/c.safetensors"], 1)
    assert (config.job.dump_folder, config.checkpoint.folder) == (f"{tmp_path}/outputs", str(tmp_path))
    assert config.checkpoint.initial_weights == f"{tmp_path}/a.safetensors"
    assert config.lora.extra[0].path == f"{tmp_path}/b.safetensors"
    assert config.lora.initial_adapter == f"{tmp_path}/c.safetensors"
    assert RunFolder(config).path == tmp_path / "outputs" / "home"
    for unchanged in ("s3://bucket/~/a", "~nobody-of-that-name/a", "a~/b", "./~/a"):
        assert load(SYNTHETIC, ["--job.dump_folder", unchanged]).job.dump_folder == unchanged


@pytest.mark.parametrize("spelling", ["./pictures/", "other/../pictures", "link"])
def test_another_spelling_of_a_place_is_no_difference(monkeypatch, tmp_path, spelling):
    monkeypatch.chdir(tmp_path)
    for name in ("pictures", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to("pictures")

    def config(path, extra="a", encoder="s3://x/./a"):
        adapters = f'[{{"path": "{extra}/b.safetensors"}}]'
        words = ["--lora.enable", "true", "--lora.extra", adapters, "--checkpoint.initial_weights", encoder]
        return load(SYNTHETIC, [*words, "--lora.initial_adapter", path])

    assert config_differences(tomllib.loads(dump_config(config("pictures", "pictures"))), config(spelling, spelling)) == []
    assert config_differences(config("pictures"), config("other")) == ["lora.initial_adapter: pictures -> other"]
    (change,) = config_differences(config("pictures"), config("pictures", encoder="s3://x/a"))
    assert change == "checkpoint.initial_weights: s3://x/./a -> s3://x/a"


def test_keys_whose_descriptions_name_a_place_are_paths():
    for section, values in every_section():
        types_of = typing.get_type_hints(type(values))
        for key in keys(values):
            names_a_place = re.search(r"\b(path|folder|file|URL|hub name)\b", key.metadata["description"])
            if names_a_place and key.name != "name" and types_of[key.name] is str:
                assert key.metadata["path"], f"{section}.{key.name}"


def test_differences_list_what_changes_learning_only():
    old = load(arguments=["--training.steps=100", "--metrics.log_freq=3", '--ema.tracks=[{"decay": 0.5}]'])
    new = load(arguments=["--training.steps=200", "--objective.timesteps.name=uniform"])
    expected = [
        "objective.timesteps.name: logit_normal -> uniform",
        "training.steps: 100 -> 200",
        'ema.tracks: [{"name": "ema", "kind": "constant", "decay": 0.5, "warmup_power": 0.6667}]'
        ' -> [{"name": "ema", "kind": "constant", "decay": 0.9999, "warmup_power": 0.6667}]',
    ]
    assert config_differences(old, new) == expected
    assert config_differences(tomllib.loads(dump_config(old)), new) == expected
    assert config_differences(old, old) == []


def test_differences_take_a_missing_key_as_its_default_and_ignore_removed_ones():
    new = load(arguments=["--objective.timesteps.mean=0.5"])
    old = tomllib.loads(dump_config(new))
    del old["objective"]["timesteps"]["mean"], old["debug"], old["ema"]["tracks"][0]["warmup_power"]
    old["training"]["gone"] = 3
    old["gone"] = {"key": 1}
    assert config_differences(old, new) == ["objective.timesteps.mean: 0.0 -> 0.5"]


@pytest.mark.parametrize("rank, printed", [(None, "a: b\nc: d\n"), ("0", "a: b\nc: d\n"), ("3", "")])
def test_the_first_rank_of_a_machine_reports_and_all_exit_with_two(rank, printed, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "5")  # of a second machine
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("LOCAL_RANK", rank)
    with pytest.raises(SystemExit) as caught:
        report_and_exit(ConfigError(["a: b", "c: d"]))
    assert caught.value.code == 2
    assert capsys.readouterr().err == printed
