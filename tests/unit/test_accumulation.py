"""A larger global batch than a shipped configuration's accumulates, on any number of ranks; and what memory's end advises."""

import tomllib
from pathlib import Path

import pytest

from torchtitan.config.job import ConfigError, load_config
from torchtitan.run import _out_of_memory

ROOT = Path(__file__).resolve().parents[2]
SHARED = [
    path for path in sorted((ROOT / "train_configs").rglob("*.toml"))
    if tomllib.loads(path.read_text()).get("training", {}).get("local_batch_size") == -1
]  # fmt: skip


def sizes(*words: str, ranks: int = 1) -> tuple[int, int]:
    training = load_config(["--job.config_file", "digits", *words], ranks).training
    return training.local_batch_size, training.global_batch_size


@pytest.mark.parametrize(("words", "ranks", "local"), [
    ((), 1, 128), ((), 2, 64), ((), 4, 32),
    (("--training.global_batch_size", "1024"), 1, 128),
    (("--training.global_batch_size", "1024"), 4, 128),
    (("--training.global_batch_size", "192"), 1, 96),  # equal microbatches
    (("--training.global_batch_size", "1024", "--training.max_local_batch_size", "0"), 1, 1024),
    (("--training.local_batch_size", "32"), 1, 32), (("--training.local_batch_size", "32"), 4, 32),
    (("--training.global_batch_size", "127"), 1, 127),
])  # fmt: skip
def test_a_larger_batch_accumulates_and_the_shipped_one_is_not_split(words, ranks, local):
    found, images = sizes(*words, "--gns.enable", "false", ranks=ranks)
    assert found == local and images % (found * ranks) == 0
    assert images == (int(words[1]) if words and "global" in words[0] else 128)


def test_a_batch_without_fitting_parts_is_refused():
    with pytest.raises(ConfigError) as refused:
        sizes("--training.global_batch_size", "262", "--gns.enable", "false", ranks=2)
    (line,) = refused.value.problems
    assert "131 images per rank split into no equal parts of about 128" in line and "(set a multiple of 256, as 512)" in line
    assert sizes("--training.global_batch_size", "512", "--gns.enable", "false", ranks=2) == (128, 512)


@pytest.mark.parametrize("path", SHARED, ids=lambda path: path.stem)
def test_shipped_configurations_take_their_own_batch_in_one_forward_of_one_rank(path):
    training = tomllib.loads(path.read_text())["training"]
    assert training["max_local_batch_size"] == training["global_batch_size"]


def test_the_end_of_memory_names_the_keys_to_lower():
    config = load_config(["--job.config_file", "digits"], 1)
    said = _out_of_memory(RuntimeError("CUDA out of memory. Tried to allocate"), config)
    assert said.startswith("out of memory (128 images at a time; --training.local_batch_size 64 --training.global_batch_size")
    assert "activation_checkpoint.mode = full needs less" in said
    words = ["--training.local_batch_size", "64", "--training.global_batch_size", "128", "--activation_checkpoint.mode", "full"]
    lower = load_config(["--job.config_file", "digits", *words], 1)
    assert (lower.training.local_batch_size, lower.training.global_batch_size) == (64, 128)
    assert "--training.local_batch_size 32 " in _out_of_memory(MemoryError(), lower) and "needs less" not in _out_of_memory(
        MemoryError(), lower)  # fmt: skip
