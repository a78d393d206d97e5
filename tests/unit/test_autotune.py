"""The batch-size search on a model of memory: candidates, limits, records, and what ends it."""

import json
import os
import stat
import subprocess
from pathlib import Path

import pytest
import torch

from tests.launcher import ROOT
from torchtitan.config.job import ConfigError, load_config
from torchtitan.experiments.autotune import tuning as module
from torchtitan.experiments.autotune.candidates import AutotuneRefused
from torchtitan.experiments.autotune.probe import Probe, ProbeFailed, probe_config
from torchtitan.experiments.autotune.record import RecordError
from torchtitan.experiments.autotune.tuning import NothingFits, autotune
from torchtitan.experiments.outcome import Outcome
from torchtitan_dit.commands import autotune_batch_size

CONFIG = """
[model]
flavor = "debug"
[data]
name = "synthetic"
[sampling]
interval = 7
"""
BASE_GIB, GIB_PER_IMAGE = 1.0, 0.125
OOM_GIB = 6.0


class FakeProbes:
    """Memory grows by GIB_PER_IMAGE with each image and runs out beyond OOM_GIB; the rate saturates."""

    def __init__(self) -> None:
        self.made: list[int] = []
        self.retries: dict[int, int] = {}
        self.failing: dict[int, BaseException] = {}

    def __call__(self, config, **how) -> Probe:
        batch_size = config.training.local_batch_size
        self.made.append(batch_size)
        if batch_size in self.failing:
            raise self.failing[batch_size]
        memory = BASE_GIB + GIB_PER_IMAGE * batch_size
        if memory > OOM_GIB:
            return Probe(batch_size, "oom", None, None, None, 1.0)
        rate = 100.0 * batch_size / (batch_size + 1)
        return Probe(batch_size, "ok", memory, self.retries.get(batch_size, 0), rate, 1.0)


@pytest.fixture
def probes(monkeypatch) -> FakeProbes:
    fake = FakeProbes()
    monkeypatch.setattr(module, "run_probe", fake)
    monkeypatch.setattr(module, "_guess", lambda *arguments: 10)
    return fake


@pytest.fixture
def arguments(tmp_path) -> list[str]:
    path = tmp_path / "small.toml"
    path.write_text(CONFIG)
    return ["--job.config_file", str(path), "--job.dump_folder", str(tmp_path / "outputs")]


@pytest.fixture
def find(arguments, tmp_path, probes):
    def found(*overrides: str, processes: int = 1, **options):
        options = {"memory_gib": 4.0, "headroom": 0.0, "cache": tmp_path / "cache"} | options
        return autotune([*arguments, *overrides], processes, **options)

    return found


def exhaustive(candidates, limit_gib: float) -> int:
    return max(size for size in candidates if BASE_GIB + GIB_PER_IMAGE * size <= min(limit_gib, OOM_GIB))


@pytest.mark.parametrize("memory_gib", [1.2, 4.0, 40.0])
@pytest.mark.parametrize("multiple_of", [1, 3])
@pytest.mark.parametrize("headroom", [0.0, 0.15])
def test_largest_is_that_of_an_exhaustive_scan(find, memory_gib, multiple_of, headroom):
    limit = (1 - headroom) * memory_gib
    if BASE_GIB + GIB_PER_IMAGE * multiple_of > limit:
        with pytest.raises(NothingFits):
            find(memory_gib=memory_gib, multiple_of=multiple_of, headroom=headroom)
    else:
        result = find(memory_gib=memory_gib, multiple_of=multiple_of, headroom=headroom)
        assert result.batch_size == exhaustive(range(multiple_of, 100, multiple_of), limit)


def test_a_given_global_batch_size_is_divided(find, probes):
    # 4 GiB hold 24 images; of 72 images, 36 on each of two ranks, 18 divide the share.
    assert find("--training.global_batch_size", "72", processes=2).batch_size == 18
    assert set(probes.made) <= {1, 2, 3, 4, 6, 9, 12, 18, 36}
    assert find("--training.global_batch_size", "72", processes=2, multiple_of=4).batch_size == 12
    with pytest.raises(AutotuneRefused, match="no multiple of 8 up to 36 divides the 36 images"):
        find("--training.global_batch_size", "72", processes=2, multiple_of=8)
    with pytest.raises(ConfigError, match="73 is not a multiple of 2"):
        find("--training.global_batch_size", "73", processes=2)


def test_a_given_global_batch_size_is_divided_between_the_processes_with_images_of_their_own(find, probes):
    shared = ("--parallelism.context_parallel_degree", "2", "--data.shape", "[1, 8, 8]")
    # 72 images on one pair of processes: 4 GiB hold 24 of them.
    assert find("--training.global_batch_size", "72", *shared, processes=2).batch_size == 24
    assert all(72 % size == 0 for size in probes.made)
    with pytest.raises(AutotuneRefused, match="no multiple of 8 up to 36 divides the 36 images"):
        find("--training.global_batch_size", "72", *shared, processes=4, multiple_of=8)


def test_a_probe_has_two_microbatches_where_processes_share_tokens(arguments, tmp_path):
    words = [*arguments, "--parallelism.context_parallel_degree", "2", "--training.local_batch_size=8"]
    config = load_config([*words, "--training.global_batch_size=64"], 4)
    assert probe_config(config, 4, tmp_path)[0].training.global_batch_size == 2 * 2 * 8
    config = load_config([*words, "--training.global_batch_size=16", "--training.double_batch_after", "[8]"], 4)
    assert probe_config(config, 4, tmp_path)[0].training.global_batch_size == 2 * 2 * 8


def test_batch_sizes_that_the_configuration_refuses_are_not_tried(find, probes):
    # Ten bins need twenty images a step.
    find("--gns.enable", "true", memory_gib=4.0)
    assert min(probes.made) >= 20
    with pytest.raises(NothingFits, match="at batch size 20, the smallest"):
        find("--gns.enable", "true", memory_gib=3.0)


def test_the_largest_allowed_bounds_the_answer(find):
    assert find(max_batch_size=13).batch_size == 13


@pytest.mark.parametrize("name", ["digits", "cifar10_noise_small"])
def test_a_shipped_configuration_with_measured_samples_can_be_probed(name, tmp_path):
    words = [] if name == "digits" else ["--data.name", "synthetic", "--data.shape", "[3, 32, 32]"]
    probed, _ = probe_config(load_config(["--config", name, *words], 1), 1, tmp_path)
    assert not (probed.sampling.enable or probed.evaluation.enable or probed.checkpoint.enable)


def test_a_batch_size_with_allocator_retries_does_not_fit(find, probes):
    probes.retries = dict.fromkeys(range(20, 100), 2)
    assert find().batch_size == 19


def test_an_answer_on_record_needs_no_try(find, probes):
    first = find()
    assert first.tried == len(probes.made) > 2
    again = find("--debug.seed", "5", "--optimizer.lr", "0.5", "--sampling.enable", "false", "--training.steps", "77")
    assert again.tried == 0 and again.batch_size == first.batch_size and again.record == first.record
    assert json.loads(first.record.read_text())["batch_size"] == first.batch_size
    assert find(fresh=True).tried == first.tried


@pytest.mark.parametrize(
    ("overrides", "options"),
    [
        (["--model.patch_size", "4"], {}),
        (["--activation_checkpoint.mode", "full"], {}),
        (["--training.global_batch_size", "128"], {}),
        (["--optimizer.name", "Muon"], {}),
        ([], {"processes": 2}),
        ([], {"memory_gib": 5.0}),
    ],
)
def test_another_question_has_another_record(find, overrides, options):
    assert find(*overrides, **options).record != find().record


def test_a_search_that_was_killed_goes_on(find, probes):
    probes.failing = {24: KeyboardInterrupt()}
    with pytest.raises(KeyboardInterrupt):
        find()
    before, probes.failing = list(probes.made), {}
    assert find().batch_size == 24
    # All tries before the one that was killed are on record; none is made again.
    assert len(set(probes.made)) == len(probes.made) - 1 and probes.made.count(24) == 2
    assert probes.made[: len(before)] == before


def test_a_failure_is_never_taken_for_a_lack_of_memory(find, probes, tmp_path):
    probes.failing = {20: ProbeFailed(20, Outcome("failed", "step 2: a bug", 1.0), tmp_path / "x.log")}
    with pytest.raises(ProbeFailed, match="batch size 20: failed: step 2: a bug"):
        find()
    [record] = (tmp_path / "cache").glob("*.json")
    content = json.loads(record.read_text())
    assert content["batch_size"] is None and 20 not in [probe["batch_size"] for probe in content["probes"]]


def test_where_nothing_fits_the_remedies_that_are_left_are_named(find):
    with pytest.raises(NothingFits) as caught:
        find(memory_gib=1.0)
    text = str(caught.value)
    assert "1.12 GiB are needed at batch size 1" in text and "\n" not in text
    assert all(word in text for word in ("activation_checkpoint.mode", "FSDP", "patch_size"))
    with pytest.raises(NothingFits) as caught:
        find("--activation_checkpoint.mode", "full", memory_gib=1.0)
    assert "activation_checkpoint.mode" not in str(caught.value)


def test_damaged_record_is_refused_and_replaced_on_demand(find):
    first = find()
    first.record.write_text("{")
    with pytest.raises(RecordError, match="damaged"):
        find()
    assert find(fresh=True).batch_size == first.batch_size and find().tried == 0
    with pytest.raises(RecordError, match="cannot be written"):
        find(cache=Path("/proc/none"))


def test_probes_train_the_same_steps_without_the_rest(arguments, tmp_path):
    words = [*arguments, "--training.local_batch_size=8", "--training.global_batch_size=64", "--sampling.interval", "3"]
    config = load_config([*words, "--lr_scheduler.warmup_steps", "50"], 1)
    config.profiling.enable_profiling = True
    short, _ = probe_config(config, 1, tmp_path)
    assert not short.profiling.enable_profiling
    assert (short.training.local_batch_size, short.training.global_batch_size) == (8, 16)
    assert not (short.sampling.enable or short.checkpoint.enable or short.validation.enable)
    assert short.model == config.model and short.data == config.data and short.ema == config.ema
    # A batch that grows accumulates later, whatever it begins with; its probe does not grow.
    config = load_config([*words[:-3], "--training.global_batch_size=8", "--training.double_batch_after", "[8]"], 1)
    short, _ = probe_config(config, 1, tmp_path)
    assert (short.training.global_batch_size, short.training.double_batch_after) == (16, [])
    # A step that measures the noise scale needs most memory: there must be one.
    config = load_config([*words, "--gns.enable", "true", "--gns.interval", "11"], 1)
    short, _ = probe_config(config, 1, tmp_path)
    assert short.training.steps == 11 and short.training.global_batch_size == 64


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--memory", "1", "--multiple-of", "9", "--max", "8"], "9 is more than max = 8"),
        (["--memory", "1", "--training.local_batch_size", "8"], "is the result of the search"),
        (["--memory", "1", "--model.flavour", "debug"], "--model.flavour: unknown key"),
        ([], "--memory GiB"),
    ],
)
def test_bad_command_line_is_one_line_and_exit_code_2(arguments, words, text, capsys, probes, monkeypatch):
    monkeypatch.setattr(module, "compute_device", lambda: torch.device("cpu"))
    try:
        code = autotune_batch_size.main([arguments[1], *words])
    except SystemExit as end:
        code = end.code
    output, error = capsys.readouterr()
    assert code == 2 and output == "" and error.count("\n") == 1 and text in error, error
    assert not probes.made


def test_the_number_alone_goes_to_stdout(arguments, capsys, probes):
    words = [arguments[1], *arguments[2:], "--sampling.classes", "[1, 2]", "--memory", "4", "--headroom", "0"]
    assert autotune_batch_size.main(words) == 0
    output, error = capsys.readouterr()
    assert output == "24\n" and "batch size    25: does not fit" in error
    assert autotune_batch_size.main([*words, "--memory", "1"]) == 1
    output, error = capsys.readouterr()
    assert output == "" and error.splitlines()[-1].startswith("nothing fits")


@pytest.fixture
def clone(tmp_path) -> Path:
    """A repository whose Python prints what it is called with, and finds the batch size 24."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / ".venv/bin").mkdir(parents=True)
    for name in ("train.sh", "status.sh"):
        (tmp_path / "scripts" / name).write_bytes((ROOT / "scripts" / name).read_bytes())
    (tmp_path / "torchtitan/processes").mkdir(parents=True)
    guard = "torchtitan/processes/parent_death.py"
    (tmp_path / guard).write_bytes((ROOT / guard).read_bytes())
    (tmp_path / "scripts/environment.sh").write_text(f"root={tmp_path}\nvenv=$root/.venv\nset_up() {{ :; }}\n")
    (tmp_path / "small.toml").write_text(CONFIG)
    python = tmp_path / ".venv/bin/python"
    python.write_text(
        '#!/bin/sh\necho "$@" >> calls\ncase $1 in scripts/autotune*) [ -z "$FAIL" ] || exit "$FAIL"; echo 24 ;; esac\n'
    )
    python.chmod(python.stat().st_mode | stat.S_IEXEC)
    return tmp_path


def train_sh(clone: Path, *words: str, before: tuple[str, ...] = (), **environment: str) -> tuple[int, str]:
    result = subprocess.run(
        ["bash", "scripts/train.sh", *before, "small.toml", *words], cwd=clone, env=os.environ | environment,
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    return result.returncode, result.stderr


def test_train_sh_trains_with_the_batch_size_found(clone):
    words = ["--autotune", "--headroom", "0.2", "--optimizer.lr", "0.1", "--memory=2", "--fresh"]
    code, error = train_sh(clone, *words)
    assert code == 0, error
    search, check, train = (clone / "calls").read_text().splitlines()
    assert search == (
        "scripts/autotune_batch_size.py small.toml --processes 1 --headroom 0.2 --memory=2 --fresh --optimizer.lr 0.1"
    )
    given = "--job.config_file small.toml --optimizer.lr 0.1 --training.local_batch_size 24"
    assert (check, train) == (f"train.py --check-only {given}", f"train.py {given}")


def test_train_sh_checks_once_where_it_is_only_to_check(clone):
    given = "--optimizer.lr 0.1 --gns.enable=false --smoke"
    for place in range(6):  # options may come before CONFIG too
        words = ("--optimizer.lr", "0.1", "--gns.enable=false", "--smoke", "--check-only")
        if place != 1:
            code, error = train_sh(clone, *words[place:], before=words[:place])
            assert code == 0, error
            assert (clone / "calls").read_text() == f"train.py --check-only --job.config_file small.toml {given}\n"
            (clone / "calls").unlink()


def test_train_sh_does_not_train_without_an_answer(clone):
    code, _ = train_sh(clone, "--autotune", FAIL="1")
    assert code == 1 and len((clone / "calls").read_text().splitlines()) == 1
    code, error = train_sh(clone, "--headroom", "0.2")
    assert code == 2 and "--headroom is an option of --autotune" in error
