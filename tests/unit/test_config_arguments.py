"""Command lines that cannot be read: each is refused in exact words."""

import pytest

from tests.configurations import problems
from torchtitan.data import DATASETS

pytestmark = pytest.mark.usefixtures("in_empty_folder")

BAD_ARGUMENTS = [
    (["--training.step", "5"], "command line: --training.step: unknown key (did you mean --training.steps?)"),
    (["--lr=1"], "command line: --lr: unknown key (did you mean --optimizer.lr?)"),
    (
        ["--training.steps"],
        "command line: --training.steps: needs a value (--training.steps VALUE or --training.steps=VALUE)",
    ),
    (
        ["--compile.enable", "--debug.seed", "3"],
        "command line: --compile.enable: needs a value (--compile.enable true or --compile.enable=true)",
    ),
    (["--compile.enable", "yes"], "command line: --compile.enable: must be true or false, is 'yes'"),
    (["--training.steps", "1.5"], "command line: --training.steps: must be an integer, is 1.5"),
    (["--training.steps", "ten"], "command line: --training.steps: must be an integer, is 'ten'"),
    (["--optimizer.lr", "nan"], "command line: --optimizer.lr: must be a finite number, is nan"),
    (["--sampling.classes", "[1,"], "command line: --sampling.classes: must be a list of integers, is '[1,'"),
    (["--ema.tracks", '[{"decay": 2}]'], "command line: --ema.tracks[0].decay: must be at least 0 and below 1, is 2"),
    (
        ["--data.name", "cifar1"],
        f"command line: --data.name: must be one of {', '.join(DATASETS)}, is 'cifar1' (did you mean cifar10?)",
    ),
    (["digts"], "digts: no such file (did you mean digits?)"),
    (["jit_b16"], "jit_b16: no such file (did you mean imagenet256/jit_b16?)"),
    (["--job.config_file="], "'': no such file (give a TOML file)"),
    (
        ["digits", "training.steps=20"],
        "command line: 'training.steps=20': argument without a key, and the configuration is digits"
        " (did you mean --training.steps=20?)",
    ),
    (
        ["--job.config_file", "digits", "cifar10"],
        "command line: 'cifar10': argument without a key, and the configuration is digits"
        " (every setting is --section.key value)",
    ),
    (["--job.config_file", "no.toml"], "no.toml: no such file (give a TOML file)"),
    (["--job.config_file", "."], ".: is a folder, not a regular file (give a TOML file)"),
    (
        ["--job.name", ""],
        "command line: --job.name: '' is no folder name; it names the run's folder (set --job.name NAME)",
    ),
]


@pytest.mark.parametrize("arguments, line", BAD_ARGUMENTS, ids=range(len(BAD_ARGUMENTS)))
def test_bad_argument_gives_one_exact_line(arguments, line):
    assert problems(arguments=arguments) == [line]
