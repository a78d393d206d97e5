"""Keys written from the habit of other programs are answered with this program's."""

import re

import pytest

from tests.forked import ROOT
from torchtitan.config.job import ConfigError, load_config
from torchtitan.settings.synonyms import SYNONYMS, synonym
from torchtitan_dit.commands import checkpoint, sample, sweep


def answer(*words: str) -> str:
    try:
        load_config(["--config", "digits", *words], 1)
    except ConfigError as refused:
        return str(refused)
    return ""


@pytest.mark.parametrize("key", sorted({key for key, _ in SYNONYMS.values() if key}))
def test_what_is_advised_exists(key):
    said = answer(f"--{key}", "x")
    assert "unknown key" not in said or f"--{key}: unknown key (it is a key of {key.partition('.')[0]}.name = " in said


def rows_of_other_programs():
    """Rows of the tables for people from other programs: names there, and what the column `here` has."""
    here = 0
    for line in (ROOT / "docs" / "coming_from.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|"):
            here = 0
        elif "here" in cells:
            here = cells.index("here")
        elif here and cells[0].startswith("`"):
            yield re.findall(r"`-*([\w.*]+[\w*-]*)", " ".join(cells[:here])), cells[here]


def test_names_of_the_page_for_other_programs_are_answered_as_there():
    answered = 0
    for names, here in rows_of_other_programs():
        for name in names:
            said = answer(f"--{name}", "x")
            if f"{name}: unknown key" in said or f"{name}': unknown key" in said:
                keys = re.findall(r"[a-z_]+\.[a-z_]+(?:\.name)?\b", here)
                assert "lists" not in said and ("scripts/" in here or not keys or any(key in said for key in keys)), (name, said)
                answered += 1
    assert answered > 50


@pytest.mark.parametrize(("words", "advice"), [
    (["--max_steps", "10"], "--max_steps: unknown key (did you mean --training.steps?)"),
    (["--training.bf16", "true"], "--training.bf16: unknown key (did you mean --training.mixed_precision_param bfloat16?)"),
    (["--cfg-scale=2"], "--cfg-scale: unknown key (did you mean --sampling.guidance_scale?)"),
    (["--amp"], "--amp: unknown key (did you mean --training.mixed_precision_param bfloat16?)"),
    (["--compile"], "--compile: unknown key (did you mean --compile.enable true?"),
    (["--autotune", "--optimizer.lr", "1"], "--autotune: unknown key (scripts/train.sh --autotune searches"),
    (["--objective.path", "linear"], "(did you mean rectified_flow?)"),
    (["--objective.prediction", "eps"], "(did you mean noise?)"),
    (["--ema_decay", "0.9"], "--ema.tracks, a list of tables with name and decay"),
    (["--fault_tolerance.enable", "true"], "--fault_tolerance.enable: unknown key (torchrun --max-restarts restarts a run"),
    (["--training.compile", "true"], "(did you mean --compile.enable true?)"),
    (["--parallelism.tensor_parallel_degree", "2"], "unknown key (there is none: docs/speed.md says when tensor parallelism"),
    (["--lr_scheduler.decay_ratio", "0.1"], "(did you mean --lr_scheduler.decay_between, in steps?)"),
    (["--optimizer.lr"], "command line: --optimizer.lr: needs a value (--optimizer.lr VALUE or --optimizer.lr=VALUE)"),
])  # fmt: skip
def test_the_command_line_is_answered(words, advice):
    assert advice in answer(*words)


@pytest.mark.parametrize(("command", "word", "advice"), [
    (sample, "--cfg-scale", "--guidance-scale"), (sample, "--num_sampling_steps", "--num-steps"),
    (sample, "--per-proc-batch-size", "--batch-size"), (sample, "--guidence-scale", "--guidance-scale"),
    (sample, "--num_fid_samples=10 --cfg-scale", "--count, --guidance-scale"),
    (sample, "--negative-prompt", "there are no negative prompts: guidance leads away from the null caption"),
    (sweep, "--partition", "--slurm partition=VALUE"),
    (sweep, "--training.steps", "keys of runs belong in [fixed] of the grid's file"),
    (checkpoint, "--steps", "--step"), (checkpoint, "--verbose", ""),
])  # fmt: skip
def test_the_options_of_commands_are_suggested_too(command, word, advice, capsys):
    with pytest.raises(SystemExit):
        before = ["export", "run", "--format", "dit", "--output", "x"] if command is checkpoint else ["run"]
        command.parse_arguments([*before, *word.split(), "3"])
    meant = f"did you mean {advice}?" if advice.startswith("--") else advice
    assert capsys.readouterr().err.endswith(f" 3 ({meant})\n" if meant else " 3\n")


def test_other_words_are_left_to_the_nearest_key():
    assert synonym("optimizer.lrr") == "" and synonym("wandb", "--") == "did you mean --metrics.enable_wandb true?"
