"""Keys written from the habit of other programs are answered with this program's."""

import pytest

from torchtitan.config.job import ConfigError, JobConfig, load_config
from torchtitan.settings.synonyms import SYNONYMS, synonym
from torchtitan_dit.commands import sample, sweep


@pytest.mark.parametrize("key", sorted({key for key, _ in SYNONYMS.values() if key}))
def test_what_is_advised_exists(key):
    section, _, name = key.partition(".")
    assert hasattr(getattr(JobConfig(), section), name)


@pytest.mark.parametrize(("words", "advice"), [
    (["--max_steps", "10"], "--max_steps: unknown key (did you mean --training.steps?)"),
    (["--training.bf16", "true"], "--training.bf16: unknown key (did you mean --training.mixed_precision_param bfloat16?)"),
    (["--cfg-scale=2"], "--cfg-scale: unknown key (did you mean --sampling.guidance_scale?)"),
    (["--amp"], "--amp: needs a value (did you mean --training.mixed_precision_param bfloat16?)"),
    (["--ema_decay", "0.9"], "--ema.tracks, a list of tables with name and decay"),
    (["--fault_tolerance.enable", "true"], "--fault_tolerance.enable: unknown key (torchrun --max-restarts restarts a run"),
    (["--training.compile", "true"], "(did you mean --compile.enable true?)"),
    (["--parallelism.tensor_parallel_degree", "2"], "unknown key (there is none: docs/speed.md says when it would pay)"),
    (["--lr_scheduler.decay_ratio", "0.1"], "(did you mean --lr_scheduler.decay_between, in steps?)"),
    (["--optimizer.lr"], "command line: --optimizer.lr: needs a value (--optimizer.lr VALUE or --optimizer.lr=VALUE)"),
])  # fmt: skip
def test_the_command_line_is_answered(words, advice):
    with pytest.raises(ConfigError) as caught:
        load_config(["--config", "digits", *words], 1)
    assert advice in str(caught.value)


@pytest.mark.parametrize(("command", "word", "advice"), [
    (sample, "--cfg-scale", "--guidance-scale"), (sample, "--num_sampling_steps", "--num-steps"),
    (sample, "--per-proc-batch-size", "--batch-size"), (sample, "--guidence-scale", "--guidance-scale"),
    (sweep, "--partition", "--slurm partition=VALUE"),
])  # fmt: skip
def test_the_options_of_commands_are_suggested_too(command, word, advice, capsys):
    with pytest.raises(SystemExit):
        command.parse_arguments(["run", word, "3"])
    assert capsys.readouterr().err.endswith(f" 3 (did you mean {advice}?)\n")


def test_other_words_are_left_to_the_nearest_key():
    assert synonym("optimizer.lrr") == "" and synonym("wandb", "--") == "did you mean --metrics.enable_wandb true?"
