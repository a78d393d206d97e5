"""Numbers that no machine holds, or whose products overflow, are one line with their key before anything is allocated."""

import resource
import time

import pytest

from torchtitan.config.job import ConfigError, load_config
from torchtitan.experiments.grid import SweepError, read_sweep
from torchtitan.settings.schema import MOST_ENTRIES
from torchtitan_dit.commands.train import main as train

BASE = ["--data.name=synthetic", "--model.flavor=debug"]
HUGE = [str(10**12), str(2**62), str(2**63 - 1)]

REFUSED = {
    "model.dim": ("must be at least 8 and at most 65536", HUGE),
    "model.num_layers": ("must be at least 1 and at most 4096", HUGE),
    "model.num_heads": ("must be at least 1 and at most 65536", HUGE),
    "model.patch_size": ("must be at least 1 and at most 1024", HUGE),
    "model.mlp_hidden_dim": ("must be at least 1 and at most 524288", HUGE),
    "data.shape": ("an image of", ["[1,65536,65536]", "[1000000000000,8,8]", f"[{2**62},{2**62},{2**62}]"]),
    "data.num_classes": ("must be at least 0 and at most 100000000", HUGE),
    "training.local_batch_size": ("must be at least -1 and at most 16777216", HUGE),
    "training.steps": ("samples, which are numbered", [str(2**62), str(2**63 - 1)]),
    "training.global_batch_size": ("", [str(2**62)]),
    "metrics.loss_bins": ("must be at least 1 and at most 1000", HUGE),
    "comm.train_timeout_seconds": ("must be at least 1 and at most 31536000", HUGE),
    "optimizer.lr": ("must be", ["1e300", "-1e300", "nan", "inf", "-inf", "1e-45", "9" * 400]),
    "model.norm_eps": ("must be", ["1e300", "1e-300", "2"]),
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, (_, values) in REFUSED.items() for value in values])
def test_a_number_that_cannot_be_is_one_line_with_its_key(key, value):
    begun = time.perf_counter()
    with pytest.raises(ConfigError) as caught:
        load_config([*BASE, f"--{key}={value}"], 1)
    named = [problem for problem in caught.value.problems if key in problem]
    words, _ = REFUSED[key]
    assert (named and words in named[0]) or key == "training.global_batch_size", caught.value.problems
    assert all("\n" not in problem and len(problem) < 300 for problem in caught.value.problems)
    assert time.perf_counter() - begun < 2


def test_sizes_that_are_possible_each_but_not_together_are_refused():
    def refused(*words: str) -> str:
        with pytest.raises(ConfigError) as caught:
            load_config([*BASE, *words], 1)
        return "\n".join(caught.value.problems)

    wide = ["--model.dim=65536", "--model.num_heads=64", "--model.mlp_hidden_dim=524288"]
    assert "model.num_layers: 4096 blocks of about 1e+11 parameters are more than 1e+13" in refused(
        *wide, "--model.num_layers=4096"
    )
    assert "model.patch_size: 1 makes 1073741824 tokens of an image" in refused(
        "--data.shape=[1,32768,32768]", "--model.patch_size=1"
    )
    images = ["--data.shape=[3,16384,16384]", "--model.patch_size=64"]
    assert "training.local_batch_size: 2000 images of 805306368 values" in refused(*images, "--training.local_batch_size=2000")
    steps = [f"--training.steps={2**40}", f"--training.double_batch_after={list(range(1, 21))}"]
    grown = refused(*steps, "--training.local_batch_size=64", "--training.global_batch_size=128")
    assert f"training.steps: {2**40} steps of up to {2**27} images are more than {2**62} samples" in grown
    assert load_config([*BASE, *images, "--training.local_batch_size=16"], 1).training.local_batch_size == 16


def test_training_refuses_before_it_allocates(tmp_path, capsys):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for words in (["--check-only"], []):
        with pytest.raises(SystemExit) as ended:
            train([*words, *BASE, f"--model.dim={10**12}", f"--job.dump_folder={tmp_path}"])
        assert ended.value.code == 2 and capsys.readouterr().err.count("\n") == 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10 and not list(tmp_path.iterdir())


def test_endless_lists_files_and_names_are_refused(tmp_path):
    def problems(text: str) -> list[str]:
        path = tmp_path / "run.toml"
        path.write_text(text)
        with pytest.raises(ConfigError) as caught:
            load_config([f"--job.config_file={path}"], 1)
        assert all("\n" not in problem and len(problem) < 400 for problem in caught.value.problems)
        return caught.value.problems

    assert f"at most {MOST_ENTRIES} entries, has 10001" in problems(f"[sampling]\nclasses = {[0] * 10001}\n")[0]
    assert "is larger than 4 MiB" in problems("#" * (4 << 20) + "\n[job]\n")[0]
    with open(tmp_path / "sparse.toml", "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ConfigError, match="is larger than 4 MiB"):
        load_config([f"--job.config_file={tmp_path / 'sparse.toml'}"], 1)
    assert "nested too deeply" in problems("a = " + "[" * 100_000)[0]
    assert "job.dump_folder" in problems(f'[job]\ndump_folder = "{"x" * 256}"\n')[0]
    assert all(problems(f'[job]\nname = "{name}"\n') for name in ("../up", "a/b", "..", "a\\u0000b", "a\\nb", "é" * 101))


@pytest.mark.parametrize("name", ["line\nbreak", "esc\x1b[2J", "not utf-8 \udcff", "\u202egnp"])
def test_a_hostile_name_of_the_file_does_not_become_the_name_of_the_run(tmp_path, name):
    path = tmp_path / f"{name}.toml"
    path.write_text('[model]\nflavor = "debug"\n')
    with pytest.raises(ConfigError) as caught:
        load_config([f"--job.config_file={path}"], 1)
    assert len(caught.value.problems) == 1 and "job.name" in caught.value.problems[0]
    assert caught.value.problems[0].isprintable()
    assert load_config([f"--job.config_file={path}", "--job.name=plain"], 1).job.name == "plain"


def test_a_grid_that_cannot_be_run_is_refused_at_once(tmp_path):
    path = tmp_path / "grid.toml"
    axes = "".join(f"training.key{number} = {list(range(1000))}\n" for number in range(10))
    path.write_text(f"[axes]\n{axes}")
    with pytest.raises(SweepError, match="their product has 1000000000000000000000000000000 cells, at most 100000"):
        read_sweep(path)
    path.write_text("[axes]\nmodel." + ".".join("a" * 3000) + " = [1]\n")
    with pytest.raises(SweepError, match="nested too deeply"):
        read_sweep(path)
    path.write_text("repeats = 1000000000\n[axes]\ntraining.steps = [1]\n")
    with pytest.raises(SweepError, match="repeats: must be at least 1 and at most 10000"):
        read_sweep(path)
