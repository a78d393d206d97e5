"""Configuration: what is refused and in which words, what wins, what is recorded."""

import dataclasses
import json
import subprocess
import sys
import tomllib
import types
import typing
from pathlib import Path

import pytest

from data import DATASETS
from torchtitan import config_checks
from torchtitan.config import (
    ConfigError,
    JobConfig,
    config_differences,
    dump_config,
    help_text,
    json_schema,
    load_config,
    report_and_exit,
)
from torchtitan.models import MODELS

ROOT = Path(__file__).parents[2]
FLAVORS = [(family, flavor) for family, entry in MODELS.items() for flavor in entry.flavors]


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def load(toml: str | None = None, arguments: list[str] | None = None, world_size: int = 1) -> JobConfig:
    argv = list(arguments or [])
    if toml is not None:
        Path("run.toml").write_text(toml, encoding="utf-8")
        argv += ["--job.config_file", "run.toml"]
    return load_config(argv, world_size)


def problems(toml: str | None = None, arguments: list[str] | None = None, world_size: int = 1) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(toml, arguments, world_size)
    return caught.value.problems


def without_file(config: JobConfig) -> JobConfig:
    return dataclasses.replace(config, job=dataclasses.replace(config.job, config_file=""))


SYNTHETIC = '[data]\nname = "synthetic"\n'
UNLABELLED = SYNTHETIC + "num_classes = 0\n"

BAD_FILES = [
    ("[training]\nlocal_batchsize = 3", "training.local_batchsize: unknown key (did you mean training.local_batch_size?)"),
    ("[training]\nlr = 1e-3", "training.lr: unknown key (did you mean optimizer.lr?)"),
    ("[training]\nwarmup_steps = 5", "training.warmup_steps: unknown key (did you mean lr_scheduler.warmup_steps?)"),
    ("[training]\nbatch_size = 5", "training.batch_size: unknown key (did you mean training.local_batch_size?)"),
    ("[training]\nqqqqqq = 5", "training.qqqqqq: unknown key (--help lists all keys)"),
    ('[training]\n"a\\nb" = 5', r"training.'a\nb': unknown key (--help lists all keys)"),
    ("[trainig]\nsteps = 5", "trainig: unknown section (did you mean training?)"),
    ("[zzz]\nsteps = 5", "zzz: unknown section (--help lists all)"),
    ("steps = 5", "steps: is in no section (did you mean training.steps?)"),
    ("training = 5", "training: must be a table, is 5 (write [training] and its keys)"),
    ("[[training]]\nsteps = 5", "training: must be a table, is [{'steps': 5}] (write [training] and its keys)"),
    ('[training]\nsteps = "10"', "training.steps: must be an integer, is '10'"),
    ("[training]\nsteps = 1.5", "training.steps: must be an integer, is 1.5"),
    ("[training]\nsteps = true", "training.steps: must be an integer, is true"),
    ("[training]\nsteps = 2024-01-01", "training.steps: must be an integer, is datetime.date(2024, 1, 1)"),
    ("[training.steps]\na = 1", "training.steps: must be an integer, is {'a': 1}"),
    ("[training]\nsteps = 0", "training.steps: must be at least 1, is 0"),
    ("[training]\nsteps = 9223372036854775808", "training.steps: must fit in 64 bits, is 9223372036854775808"),
    ("[training]\nsteps = 0x" + "f" * 5000, "training.steps: must fit in 64 bits, is a value too long to print"),
    ("[optimizer]\nlr = nan", "optimizer.lr: must be a finite number, is nan"),
    ("[optimizer]\nlr = inf", "optimizer.lr: must be a finite number, is inf"),
    ("[optimizer]\nlr = 0", "optimizer.lr: must be above 0, is 0"),
    ("[optimizer]\nbeta1 = 1.0", "optimizer.beta1: must be at least 0 and below 1, is 1.0"),
    ("[compile]\nenable = 1", "compile.enable: must be true or false, is 1"),
    ("[job]\ndump_folder = 1", "job.dump_folder: must be a string, is 1"),
    ('[job]\ndump_folder = "a\\u0000b"', r"job.dump_folder: must have printable characters only, is 'a\x00b'"),
    (
        '[objective]\ntimestep_sampler = "unifrom"',
        "objective.timestep_sampler: must be one of uniform, logit_normal, is 'unifrom' (did you mean uniform?)",
    ),
    ('[metrics]\npeak_tflops = "x"', "metrics.peak_tflops: must be a number, or none, is 'x'"),
    ("[sampling]\nclasses = [1, 2.5]", "sampling.classes[1]: must be an integer, is 2.5"),
    ("[sampling]\nclasses = 3", "sampling.classes: must be a list of integers, is 3"),
    ("[ema]\ntracks = [3]", "ema.tracks[0]: must be a table, is 3"),
    ("[[ema.tracks]]\nname = 'ema'\ndecy = 0.9", "ema.tracks[0].decy: unknown key (did you mean decay?)"),
    ("[[ema.tracks]]\ndecay = 2", "ema.tracks[0].decay: must be at least 0 and below 1, is 2"),
    (
        "[[ema.tracks]]\nname = 'ema'\n[[ema.tracks]]\nname = 'ema'",
        "ema.tracks[1].name: 'ema' is the name of an earlier track",
    ),
    (
        "[[ema.tracks]]\nname = 'ema'\n[[ema.tracks]]\nname = 'none'",
        "ema.tracks[1].name: 'none' stands for the trained weights (choose another name)",
    ),
    (
        "[[ema.tracks]]\nname = 'ema'\n[[ema.tracks]]\nname = '../x'",
        "ema.tracks[1].name: '../x' names a file (use up to 64 letters, digits, '.', '_' and '-', no '.' or '-' first)",
    ),
    ('[data]\nname = "cifar1"\nx = 1', f"data.name: must be one of {', '.join(DATASETS)}, is 'cifar1' (did you mean cifar10?)"),
    ("[model]\nname = 3", f"model.name: must be one of {', '.join(MODELS)}, is 3"),
    (
        '[model]\nflavor = "digit"',
        f"model.flavor: must be one of {', '.join(MODELS['dit'].flavors)}, is 'digit' (did you mean digits?)",
    ),
    (
        "[model]\nflavor = 'digits'\nnum_heads = 5",
        "model.num_heads: 5 does not divide model.dim = 192",
    ),
    ("[model]\nflavor = 'digits'\npatch_size = 3", "model.patch_size: 3 does not divide the image of 8 x 8"),
    (
        "[model]\nflavor = 'digits'\nnum_heads = 32",
        "model.num_heads: heads of 6 channels; rotary embedding needs a multiple of 4",
    ),
    (
        "[model]\nlearned_variance = true",
        "model.learned_variance: objective.path = rectified_flow has no variance to learn (set it to false)",
    ),
    (
        UNLABELLED + "[model]\nlabel_dropout = 0.2",
        "model.label_dropout: data.name = synthetic has no classes to drop (remove it or set it to 0)",
    ),
    (
        UNLABELLED + "[sampling]\nguidance_scale = 2",
        "sampling.guidance_scale: data.name = synthetic has no classes to guide away from (remove it or set it to 1)",
    ),
    (
        "[model]\nlabel_dropout = 0.0\n[sampling]\nguidance_scale = 2",
        "sampling.guidance_scale: model.label_dropout = 0 trains no unconditional prediction to guide away from"
        " (remove it or set it to 1)",
    ),
    (
        "[sampling]\nclasses = [0, 10, -1]",
        "sampling.classes: [10, -1] is not in data.name = digits, which has the classes 0 to 9",
    ),
    (
        "[sampling]\nema_track = 'emma'",
        "sampling.ema_track: 'emma' is not a name in ema.tracks (did you mean ema?)",
    ),
    (
        "[training]\nsteps = 10\n[lr_scheduler]\nwarmup_steps = 11",
        "lr_scheduler.warmup_steps: 11 is more than training.steps = 10",
    ),
    (
        "[training]\nglobal_batch_size = 48",
        "training.global_batch_size: 48 is not a multiple of 32 = 1 ranks x training.local_batch_size"
        " (set a multiple, or -1 for 32)",
    ),
    (
        "[parallelism]\ndata_parallel_replicate_degree = -1",
        "parallelism.data_parallel_replicate_degree: only one of it and parallelism.data_parallel_shard_degree can be -1",
    ),
    (
        "[parallelism]\ndata_parallel_shard_degree = 0",
        "parallelism.data_parallel_shard_degree: must be at least 1, or -1 for what is left, is 0",
    ),
    (
        "[parallelism]\ndata_parallel_replicate_degree = 2",
        "parallelism.data_parallel_replicate_degree: 2 does not divide the 1 process of this run",
    ),
    (
        "[parallelism]\ndata_parallel_shard_degree = 2",
        "parallelism.data_parallel_shard_degree: 1 replicas x 2 shards are not the 1 process of this run"
        " (-1 means what is left)",
    ),
    ('[job]\nname = "a/b"', "job.name: 'a/b' has a slash; it names the run's folder (set --job.name NAME)"),
    ('[job]\nname = ".."', "job.name: '..' is no folder name; it names the run's folder (set --job.name NAME)"),
    ('[job]\nconfig_file = "x"', "job.config_file: is for the command line only (remove it)"),
    (
        "[objective]\ntimestep_sampler = 'uniform'\nlogit_mean = 0.0",
        "objective.logit_mean: has no effect when objective.timestep_sampler = uniform;"
        " remove it or set objective.timestep_sampler = logit_normal",
    ),
    (
        "[lr_scheduler]\nmin_lr_factor = 0.1",
        "lr_scheduler.min_lr_factor: has no effect when lr_scheduler.decay_type = constant;"
        " remove it or set lr_scheduler.decay_type = linear or cosine",
    ),
    (
        "[data]\nprefetch_factor = 4",
        "data.prefetch_factor: has no effect when data.num_workers = 0; remove it or set data.num_workers above 0",
    ),
    (
        "[checkpoint]\nenable = false\nload_step = 5",
        "checkpoint.load_step: has no effect when checkpoint.enable = false; remove it or set checkpoint.enable = true",
    ),
    ('[data]\nname = "synthetic"\nshape = [8, 8]', "data.shape: [8, 8] is not three positive numbers: channels, height, width"),
    ("[training]\nsteps 5", "TOML syntax: Expected '=' after a key in a key/value pair (at line 2, column 7)"),
]

BAD_ARGUMENTS = [
    (["--training.step", "5"], "command line: --training.step: unknown key (did you mean --training.steps?)"),
    (["--lr=1"], "command line: --lr: unknown key (did you mean --optimizer.lr?)"),
    (["--training.steps"], "command line: --training.steps: needs a value (--training.steps VALUE or --training.steps=VALUE)"),
    (
        ["--compile.enable", "--debug.seed", "3"],
        "command line: --compile.enable: needs a value (--compile.enable VALUE or --compile.enable=VALUE)",
    ),
    (["--compile.enable", "yes"], "command line: --compile.enable: must be true or false, is 'yes'"),
    (["--training.steps", "1.5"], "command line: --training.steps: must be an integer, is 1.5"),
    (["--training.steps", "1e99"], "command line: --training.steps: must fit in 64 bits, is 1e+99"),
    (["--training.steps", "ten"], "command line: --training.steps: must be an integer, is 'ten'"),
    (["--training.steps="], "command line: --training.steps: must be an integer, is ''"),
    (["--training.steps", "none"], "command line: --training.steps: must be an integer, is 'none'"),
    (["--optimizer.lr", "nan"], "command line: --optimizer.lr: must be a finite number, is nan"),
    (["--sampling.classes", "[1,"], "command line: --sampling.classes: must be a list of integers, is '[1,'"),
    (["--sampling.classes", "[" * 100_000], None),
    (["--ema.tracks", '[{"decay": 2}]'], "command line: --ema.tracks[0].decay: must be at least 0 and below 1, is 2"),
    (["--data.name", "cifar1"], f"command line: --data.name: must be one of {', '.join(DATASETS)}, is 'cifar1' (did you mean cifar10?)"),
    (["x"], "command line: 'x': argument without a key (every setting is --section.key value)"),
    (["x.toml"], "command line: 'x.toml': argument without a key (--job.config_file x.toml)"),
    (["--job.config_file", "no.toml"], "no.toml: no such file (--job.config_file must name a TOML file)"),
    (["--job.config_file", "."], ".: is a folder (give a TOML file)"),
    (["--job.config_file", "/dev/null"], "/dev/null: is not a regular file (give a TOML file)"),
    (["--job.config_file", "a\0b"], r"'a\x00b': cannot be read: embedded null byte"),
    (["--job.name", ""], "command line: --job.name: '' is no folder name; it names the run's folder (set --job.name NAME)"),
]


@pytest.mark.parametrize("toml, line", BAD_FILES, ids=range(len(BAD_FILES)))
def test_bad_file_gives_one_exact_line(toml, line):
    assert problems(toml) == [f"run.toml: {line}"]


@pytest.mark.parametrize("arguments, line", BAD_ARGUMENTS, ids=range(len(BAD_ARGUMENTS)))
def test_bad_argument_gives_one_exact_line(arguments, line):
    found = problems(arguments=arguments)
    assert found == [line] if line else (len(found) == 1 and len(found[0]) < 200)


def test_file_that_is_not_utf8_is_one_line():
    Path("run.toml").write_bytes(b"[job]\nname = '\xff'\n")
    assert problems(arguments=["--job.config_file", "run.toml"]) == [
        "run.toml: is not UTF-8 text, see byte 14 (save it as UTF-8)"
    ]


def test_toml_nested_too_deeply_is_one_line():
    found = problems("x = " + "[" * 100_000)
    assert len(found) == 1 and found[0].startswith("run.toml: TOML syntax: ")


def test_all_problems_are_reported_at_once_with_where_each_value_came_from():
    toml = "[training]\nsteps = 0\nlr = 1\n[objective]\ntimestep_sampler = 'uniform'\n[sampling]\nclasses = [99]\n"
    found = problems(toml, ["--objective.logit_std", "2", "--debug.sede", "1", "--parallelism.data_parallel_shard_degree=4"])
    assert [line.rsplit(": ", 1)[0] for line in found] == [
        "command line: --debug.sede",
        "run.toml: training.steps",
        "run.toml: training.lr",
        "command line: --objective.logit_std",
        "command line: --parallelism.data_parallel_shard_degree",
        "run.toml: sampling.classes",
    ]


def test_impossible_default_says_that_it_is_a_default():
    assert problems("[ema]\ntracks = []") == [
        "default: sampling.ema_track: 'ema' is not a name in ema.tracks (set it to one of none)"
    ]


def test_check_that_reads_a_refused_value_is_silent():
    assert problems("[model]\ndim = 'wide'\nnum_heads = 7") == ["run.toml: model.dim: must be an integer, is 'wide'"]


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
    assert load("[model]\nflavor = 'digits'", ["--model.flavor", "debug"]).model == MODELS["dit"].flavors["debug"]


@pytest.mark.parametrize(
    "argument, value",
    [
        ("--training.steps=10_000", 10_000),
        ("--training.steps=1e6", 1_000_000),
        ("--optimizer.lr=1e-4", 1e-4),
        ("--optimizer.lr=1", 1.0),
        ("--compile.enable=false", False),
        ("--sampling.classes=[1, 2]", [1, 2]),
        ("--metrics.peak_tflops=none", None),
        ("--metrics.peak_tflops=null", None),
        ("--metrics.peak_tflops=3", 3.0),
        ("--job.dump_folder=a=b", "a=b"),
        ("--job.dump_folder=true", "true"),
        ("--objective.logit_mean=-0.5", -0.5),
        ("--activation_checkpoint.mode=none", "none"),
    ],
)
def test_command_line_value_is_read_as_the_type_of_its_key(argument, value):
    section, key = argument[2:].split("=")[0].split(".")
    got = getattr(getattr(load(arguments=[argument]), section), key)
    assert got == value and type(got) is type(value)


def test_negative_number_may_follow_its_flag():
    assert load(arguments=["--objective.logit_mean", "-0.5"]).objective.logit_mean == -0.5


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


def test_run_is_named_after_its_file():
    assert load("").job.name == "run"
    assert load().job.name == "run"
    Path("small.dit.toml").write_text("")
    assert load_config(["--job.config_file", "small.dit.toml"], 1).job.name == "small.dit"
    assert load_config(["--job.config_file", "small.dit.toml", "--job.name", "other"], 1).job.name == "other"


@pytest.mark.parametrize("package, key", [("tensorboard", "enable_tensorboard"), ("wandb", "enable_wandb")])
def test_logger_without_its_package_is_refused(package, key, monkeypatch):
    monkeypatch.setattr(config_checks.importlib.util, "find_spec", lambda name: None if name == package else object())
    requirement = {"tensorboard": "tensorboard", "wandb": "'.[wandb]'"}[package]
    advice = f"the package {package} is not installed (pip install {requirement}, or set it to false)"
    assert problems(f"[metrics]\n{key} = true") == [f"run.toml: metrics.{key}: {advice}"]


def test_compile_without_compiler_is_refused(monkeypatch):
    monkeypatch.setattr(config_checks.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(config_checks.shutil, "which", lambda name: None)
    assert problems("[compile]\nenable = true") == [
        "run.toml: compile.enable: needs a C++ compiler on the CPU, none of g++, clang++ and $CXX is there"
        " (install g++ or set it to false)"
    ]
    monkeypatch.setenv("CXX", "mycc -O2")
    monkeypatch.setattr(config_checks.shutil, "which", lambda name: name if name == "mycc" else None)
    assert load("[compile]\nenable = true").compile.enable


@pytest.mark.parametrize("family, flavor", FLAVORS)
def test_dump_of_every_flavor_loads_equal(family, flavor):
    arguments = [f"--model.name={family}", f"--model.flavor={flavor}", "--data.name=synthetic", "--data.shape=[4,32,32]"]
    config = load(arguments=arguments, world_size=2)
    assert without_file(load(dump_config(config), world_size=2)) == without_file(config)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--objective.timestep_sampler=uniform", "--sampling.enable=false", "--checkpoint.enable=false"],
        ["--ema.tracks=[]", "--sampling.ema_track=none", "--metrics.peak_tflops=0.1", "--data.num_workers=2"],
        ["--ema.tracks=[{\"name\": \"a\", \"decay\": 1e-3}]", "--sampling.ema_track=a", "--job.name=caf\u00e9 \"1\""],
        ["--data.name=synthetic", "--data.num_classes=0", "--data.kind=noise"],
        ["--model.flavor=digits", "--model.position=sincos", "--lr_scheduler.decay_type=cosine"],
    ],
)
def test_dump_of_overrides_loads_equal(arguments):
    config = load(arguments=arguments)
    assert without_file(load(dump_config(config))) == without_file(config)


@pytest.mark.parametrize("path", sorted((ROOT / "train_configs").glob("*.toml")), ids=lambda path: path.name)
def test_shipped_file_fits_the_schema_and_dumps_equal(path):
    document = tomllib.loads(path.read_text(encoding="utf-8"))
    assert schema_errors(document, json_schema()) == []
    try:
        config = load_config(["--job.config_file", str(path)], 1)
    except ConfigError as error:  # data and several processes may not be here; nothing else may be wrong
        assert all("data.path: " in line or "parallelism." in line or "training.global_batch" in line for line in error.problems)
        return
    assert without_file(load(dump_config(config))) == without_file(config)


def test_dump_holds_what_has_an_effect_and_starts_with_a_comment():
    text = dump_config(load("[objective]\ntimestep_sampler = 'uniform'"))
    document = tomllib.loads(text)
    assert text.startswith("# ")
    assert list(document) == [field.name for field in dataclasses.fields(JobConfig)]
    assert "config_file" not in document["job"] and "peak_tflops" not in document["metrics"]
    assert "logit_mean" not in document["objective"] and document["objective"]["timestep_sampler"] == "uniform"


def test_keys_declare_what_the_record_relies_on():
    """None is not written, so it must be the default; what depends on a key must be able to find it."""
    instances = [family.flavors[flavor] for family in MODELS.values() for flavor in family.flavors]
    instances += [dataset.Config() for dataset in DATASETS.values()]
    instances += [getattr(JobConfig(), field.name) for field in dataclasses.fields(JobConfig)]
    for instance in instances:
        hints = typing.get_type_hints(type(instance))
        for field in dataclasses.fields(instance):
            assert field.metadata["description"], field.name
            if types.NoneType in typing.get_args(hints[field.name]):
                assert getattr(instance, field.name) is None, field.name
            for key in field.metadata["applies"]:
                assert "." in key or key in hints, field.name
            element = (*typing.get_args(hints[field.name]), None)[0]
            if dataclasses.is_dataclass(element):
                assert not any(inner.metadata["applies"] for inner in dataclasses.fields(element))


def test_differences_list_what_changes_learning_only():
    old = load(arguments=["--training.steps=100", "--metrics.log_freq=3", "--ema.tracks=[{\"decay\": 0.5}]"])
    new = load(arguments=["--training.steps=200", "--objective.timestep_sampler=uniform"])
    expected = [
        "objective.timestep_sampler: logit_normal -> uniform",
        "training.steps: 100 -> 200",
        'ema.tracks: [{"name": "ema", "decay": 0.5, "warmup_power": 0.6667}]'
        ' -> [{"name": "ema", "decay": 0.9999, "warmup_power": 0.6667}]',
    ]
    assert config_differences(old, new) == expected
    assert config_differences(tomllib.loads(dump_config(old)), new) == expected
    assert config_differences(old, old) == []


def test_differences_take_a_missing_key_as_its_default_and_ignore_removed_ones():
    new = load(arguments=["--objective.logit_mean=0.5"])
    old = tomllib.loads(dump_config(new))
    del old["objective"]["logit_mean"], old["debug"], old["ema"]["tracks"][0]["warmup_power"]
    old["training"]["gone"] = 3
    old["gone"] = {"key": 1}
    assert config_differences(old, new) == ["objective.logit_mean: 0.0 -> 0.5"]
    assert config_differences(old | {"objective": 3}, new) == ["objective.logit_mean: 0.0 -> 0.5"]


def test_help_has_every_key_with_its_description():
    text = " ".join(help_text().split())
    for section in dataclasses.fields(JobConfig):
        for field in dataclasses.fields(getattr(JobConfig(), section.name)):
            assert f"--{section.name}.{field.name} " in text
            assert " ".join(field.metadata["description"].split()) in text
    assert "--objective.logit_std a number, above 0 (default 1.0)" in text
    assert "only with objective.timestep_sampler = logit_normal" in text
    assert "--data.num_classes" in text and "DiT-XL/2," in text


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
    if wanted == "null" or wanted and (not isinstance(value, kinds[wanted]) or isinstance(value, bool) > (wanted == "boolean")):
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
    for arguments in ([], ["--data.name=synthetic"], ["--ema.tracks=[]", "--sampling.ema_track=none"]):
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
        ({"ema": {"tracks": [{"decay": 1}]}}, ".ema.tracks[0].decay is out of range"),
    ]:
        assert schema_errors(document, schema) == [error]


def test_module_writes_the_schema():
    command = [sys.executable, "-m", "torchtitan.config", str(Path("schema.json").absolute())]
    subprocess.run(command, cwd=ROOT, check=True)
    assert json.loads(Path("schema.json").read_text()) == json_schema()


def test_import_reads_no_optional_package():
    code = "import sys, torchtitan.config; print([n for n in ('sklearn', 'tensorboard', 'wandb') if n in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    assert shown.stdout.strip() == "[]"


@pytest.mark.parametrize("rank, printed", [(None, "a: b\nc: d\n"), ("0", "a: b\nc: d\n"), ("3", "")])
def test_only_rank_zero_reports_and_all_exit_with_two(rank, printed, monkeypatch, capsys):
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    with pytest.raises(SystemExit) as caught:
        report_and_exit(ConfigError(["a: b", "c: d"]))
    assert caught.value.code == 2
    assert capsys.readouterr().err == printed
