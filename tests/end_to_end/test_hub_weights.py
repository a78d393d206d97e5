"""Weights read from a hub, which a small module stands for: the real package is asked for no more."""

import sys
from pathlib import Path
from types import ModuleType

import pytest

import torchtitan_dit
from tests.forked import ROOT, run_script
from torchtitan.files.weight_files import WeightsError
from torchtitan_dit.commands.checkpoint import main


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    words = ("--job.config_file", str(ROOT / "train_configs" / "digits.toml"), "--job.name", "digits-small")
    words += ("--training.steps", "2", "--lr_scheduler.warmup_steps", "1", "--model.flavor", "debug", "--gns.enable", "false")
    words += ("--evaluation.enable", "false", "--training.local_batch_size", "16", "--sampling.enable", "false")
    words += ("--checkpoint.interval", "2", "--validation.enable", "false")
    done = run_script(f"{ROOT}/train.py", *words, folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "outputs" / "digits-small"


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Path:
    module = ModuleType("huggingface_hub")

    def snapshot_download(repository, allow_patterns):
        folder = tmp_path / "hub" / repository
        if not folder.is_dir():
            raise OSError("404: there is no such repository")
        return str(folder)

    module.snapshot_download = snapshot_download
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "hub"


def test_weights_of_the_hub_draw_the_same_as_the_run(run, hub):
    folder = hub / "someone" / "small-digits"
    folder.mkdir(parents=True)
    assert main(["export", str(run), "--format", "safetensors", "--output", str(folder / "weights.safetensors")]) == 0
    options = {"num_steps": 3, "guidance_scale": 2.0}
    pulled = torchtitan_dit.load("someone/small-digits", **options)
    assert pulled.class_names == tuple("0123456789")
    theirs = [image.tobytes() for image in pulled.sample([1, 5], seed=3)]
    assert theirs == [image.tobytes() for image in torchtitan_dit.load(run, **options).sample([1, 5], seed=3)]
    with pytest.raises(WeightsError, match="someone/nothing: no such run, file or folder here, and it cannot be fetched"):
        torchtitan_dit.load("someone/nothing")
