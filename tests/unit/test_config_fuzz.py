"""Any file and any arguments give a configuration that its own dump repeats, or plain lines; no other exception."""

import random
from pathlib import Path

import pytest

from torchtitan.config.job import ConfigError, JobConfig, dump_config, load_config

SEED_COUNT = 2000

VALID = """\
[job]
dump_folder = "outputs"
[model]
name = "dit"
flavor = "digits"
num_layers = 2
position = "rotary"
[data]
name = "synthetic"
shape = [1, 8, 8]
num_classes = 10
[objective]
timesteps.name = "logit_normal"
timesteps.std = 1.0
[optimizer]
lr = 1e-3
[lr_scheduler]
warmup_steps = 10
[training]
steps = 100
local_batch_size = 8
max_norm = 1.0
[parallelism]
data_parallel_shard_degree = -1
[checkpoint]
enable = true
interval = 10
[metrics]
peak_tflops = 1.0
[sampling]
classes = [0, 1]
ema_track = "slow"
[[ema.tracks]]
name = "slow"
decay = 0.999
[[ema.tracks]]
name = "fast"
"""

# fmt: off
VALUES = [
    "0", "-1", "1", "true", "false", "none", "null", "nan", "inf", "-inf", "1e6", "1e999", "-1e-400", "10_000",
    "0x" + "f" * 6000, "9" * 30, "9" * 5000, "-9223372036854775809", "1.5", '""', '"\u00e9\u4e2d\U0001f600"',
    '"\\u0000"', '"a\\nb"', "''", '"' + "x" * 5000 + '"', "[]", "[[]]", "[1, 'a', 2.0]", "{}", "{a = 1}", "[{}]",
    "[{name = 'x', decay = nan}]", '[{"name": "../x"}]', "[" * 400 + "]" * 400, "[" * 20000,
    "{a=" * 300 + "1" + "}" * 300, "2024-01-01", "12:00:00", "1979-05-27T07:32:00Z", "=", "#", "\x00", "\u202e",
    "'..'", "'a/b'", "[99999999999999999999999]", "['slow']", "uniform", '"uniform"', '"synthetic"', '"digits"',
    "[0, 8, 8]", "[1, 8, 8, 8]", "1e-4",
]

NAMES = [
    "steps", "training", "training.steps", "ema.tracks", "ema.tracks[0].decay", "model.flavor", "model.name",
    "data.name", "data.shape", "data.num_classes", "job.name", "job.config_file", "optimizer.lr",
    "training.global_batch_size", "sampling.classes", "sampling.ema_track",
    "parallelism.data_parallel_replicate_degree", "parallelism.data_parallel_shard_degree", "model.num_heads",
    "model.patch_size", "model.dim", "", ".", "..", "a.b.c", "\u00e9.\u00e9", "x" * 5000, "-", "--", "__class__",
    "model.__class__", "training.model_fields", "metrics.peak_tflops", "compile.enable", "training.local_batch_size",
    "lr_scheduler.warmup_steps", "a\nb.c", "model.label_dropout",
]
# fmt: on


def flip_characters(draw: random.Random, text: str) -> str:
    characters = list(text)
    for _ in range(draw.randint(1, 4)):
        characters[draw.randrange(len(characters))] = draw.choice(
            ["", '"', "[", "]", "=", ".", "\n", "\r", "\t", "e", "9", "\u00fc", "\x00", " "]
        )
    return "".join(characters)


def move_lines(draw: random.Random, text: str) -> str:
    lines = text.splitlines()
    for _ in range(draw.randint(1, 3)):
        line = draw.choice(lines)
        draw.choice([lines.remove, lines.append, lambda line: lines.insert(draw.randrange(len(lines)), line)])(line)
    return "\n".join(lines)


def change_value(draw: random.Random, text: str) -> str:
    lines = text.splitlines()
    for _ in range(draw.randint(1, 3)):
        at = draw.choice([index for index, line in enumerate(lines) if " = " in line])
        lines[at] = lines[at].split(" = ")[0] + " = " + draw.choice(VALUES)
    return "\n".join(lines)


def swap_values(draw: random.Random, text: str) -> str:
    lines = text.splitlines()
    first, second = draw.sample([index for index, line in enumerate(lines) if " = " in line], 2)
    (first_key, first_value), (second_key, second_value) = (lines[at].split(" = ", 1) for at in (first, second))
    lines[first], lines[second] = f"{first_key} = {second_value}", f"{second_key} = {first_value}"
    return "\n".join(lines)


def rename(draw: random.Random, text: str) -> str:
    lines = text.splitlines()
    at = draw.randrange(len(lines))
    name = draw.choice([*NAMES, '"' + "k" * 300 + '"', '"\\u0007"', '"a.b"', "steps.steps"])
    lines[at] = draw.choice([f"[{name}]", f"[[{name}]]", f"{name} = {draw.choice(VALUES)}"])
    return "\n".join(lines)


def change_number(draw: random.Random, text: str) -> str:
    lines = text.splitlines()
    at = draw.choice([index for index, line in enumerate(lines) if line[-1:].isdigit()] or [0])
    lines[at] = lines[at].split(" = ")[0] + f" = {draw.choice([1, 2, 8, 64, 0.5, 0.25, 1e3])}"
    return "\n".join(lines)


MUTATIONS = [flip_characters, move_lines, change_value, swap_values, rename, change_number, lambda draw, text: text]


def draw_arguments(draw: random.Random) -> list[str]:
    arguments = []
    for _ in range(draw.choice([0, 0, 1, 3])):
        name, value = draw.choice(NAMES), draw.choice(VALUES)
        arguments += draw.choice([[f"--{name}", value], [f"--{name}={value}"], [f"--{name}"], [value]])
    return arguments


@pytest.mark.parametrize("part", range(4))
def test_mutated_configurations_load_or_are_refused_in_plain_lines(part, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = Path("fuzz.toml")
    loaded = refused = 0
    for seed in range(part * SEED_COUNT // 4, (part + 1) * SEED_COUNT // 4):
        draw = random.Random(seed)
        text = VALID
        for _ in range(draw.randint(1, 2)):
            text = draw.choice(MUTATIONS)(draw, text)
        content = text.encode("utf-8")
        if draw.random() < 0.05:
            content = content[: draw.randrange(len(content))] + bytes([draw.randrange(128, 256)]) + content
        path.write_bytes(content)
        arguments = ["--job.config_file", str(path), *draw_arguments(draw)]
        world_size = draw.choice([1, 1, 2, 6])
        try:
            config = load_config(arguments, world_size)
        except ConfigError as error:
            refused += 1
            assert error.problems, seed
            for line in error.problems:
                assert line.isprintable() and ": " in line and len(line) < 1500, (seed, line[:300])
                assert "pydantic" not in line and "Traceback" not in line, (seed, line)
        else:
            loaded += 1
            assert isinstance(config, JobConfig)
            path.write_text(dump_config(config), encoding="utf-8")
            assert load_config(arguments[:2], world_size) == config, seed
    assert loaded > 25 and refused > 200  # both sides of the property are exercised
