"""Weights pushed to and pulled from a hub, which a small module stands for: the real package is asked for no more."""

import json
import shutil
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
import tomli_w
from PIL import Image

import torchtitan_dit
from tests.forked import ROOT, run_script
from torchtitan.files.weight_files import WeightsError
from torchtitan_dit.commands.checkpoint import main


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    words = ("--job.config_file", str(ROOT / "train_configs" / "digits.toml"), "--job.name", "digits-small")
    words += ("--training.steps", "4", "--lr_scheduler.warmup_steps", "1", "--model.flavor", "debug", "--gns.enable", "false")
    words += ("--evaluation.enable", "false", "--training.local_batch_size", "16", "--sampling.num_steps", "2")
    words += ("--checkpoint.interval", "2", "--optimizer.lr", "0.00037")
    done = run_script(f"{ROOT}/train.py", *words, folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "outputs" / "digits-small"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Repositories by name, as folders; `hub.made` has what they were made with."""
    module = ModuleType("huggingface_hub")
    made: dict[str, dict] = {}

    class HfApi:
        def create_repo(self, repo_id, *, private, exist_ok):
            if repo_id.startswith("others/"):
                raise OSError("403 Forbidden: this repository is another's")
            made.setdefault(repo_id, {"private": private})

        def upload_folder(self, *, repo_id, folder_path, commit_message):
            shutil.copytree(folder_path, tmp_path / "hub" / repo_id, dirs_exist_ok=True)
            made[repo_id]["message"] = commit_message
            return f"commit of {repo_id}"

    def snapshot_download(repository, allow_patterns):
        folder = tmp_path / "hub" / repository
        if not folder.is_dir():
            raise OSError("404: there is no such repository")
        return str(folder)

    module.HfApi, module.snapshot_download, module.made = HfApi, snapshot_download, made
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    monkeypatch.chdir(tmp_path)
    return module


def test_what_is_pushed_is_pulled_and_draws_the_same(run, hub, tmp_path, capsys):
    assert main(["push", str(run), "--repo", "someone/small-digits", "--private"]) == 0
    assert "commit of someone/small-digits" in capsys.readouterr().out
    assert hub.made["someone/small-digits"] == {"private": True, "message": "step 4, ema"}
    options = {"num_steps": 3, "guidance_scale": 2.0}
    pulled = torchtitan_dit.load("someone/small-digits", **options)
    assert pulled.class_names == tuple("0123456789")
    theirs = [image.tobytes() for image in pulled.sample([1, 5], seed=3)]
    assert theirs == [image.tobytes() for image in torchtitan_dit.load(run, **options).sample([1, 5], seed=3)]
    folder = tmp_path / "hub" / "someone" / "small-digits"
    assert Image.open(folder / "samples.png").size == Image.open(run / "samples" / "step-00000004.png").size
    card = (folder / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: torchtitan-dit\n") and "torchtitan-dit sample someone/small-digits" in card
    for fact in ("class-conditional", "| training | 4 steps of 128 images, float32 |", "on rectified_flow", "held-out loss"):
        assert fact in card, card
    assert str(run.parent) not in card


def test_a_card_tells_of_the_training_where_the_data_are_gone_and_at_an_earlier_step(run, hub, tmp_path):
    moved = shutil.copytree(run, tmp_path / "moved")
    tables = tomllib.loads((moved / "config.toml").read_text())
    assert tables["training"]["global_batch_size"] == 128
    tables["data"] = {"name": "image_folder", "path": str(tmp_path / "gone"), "image_size": 16}
    (moved / "config.toml").write_text(tomli_w.dumps(tables))
    assert main(["push", str(moved), "--repo", "a/b", "--step", "2", "--dry-run", str(tmp_path / "files")]) == 0
    card = (tmp_path / "files" / "README.md").read_text()
    rate = tables["optimizer"]["lr"]
    for fact in ("| data | image_folder, ", "| training | 2 steps of 128 images, float32 |", f"learning rate {rate:g} |"):
        assert fact in card, card
    assert "images seen" not in card


def test_a_card_shows_the_measured_scores_of_its_step(run, hub, tmp_path):
    moved = shutil.copytree(run, tmp_path / "moved")
    summary = json.loads((moved / "summary.json").read_text())
    for step, shown in ((4, True), (2, False)):
        measured = {"step": step, "fd": {"value": 1.25, "lower": 1.0, "upper": 1.5}, "precision": {"value": 0.5}}
        (moved / "summary.json").write_text(json.dumps(summary | {"evaluation": measured}))
        assert main(["push", str(moved), "--repo", "a/b", "--dry-run", str(tmp_path / f"files-{step}")]) == 0
        card = (tmp_path / f"files-{step}" / "README.md").read_text()
        assert ("| fd | 1.25 [1, 1.5] |" in card and "| precision | 0.5 |" in card) == shown, card


def test_a_dry_run_uploads_nothing(run, hub, tmp_path, capsys):
    words = ["push", str(run), "--repo", "someone/x", "--dry-run", str(tmp_path / "files")]
    assert main(words) == 0
    assert "README.md, samples.png, weights.safetensors" in capsys.readouterr().out and not hub.made
    assert main(words) == 2 and "files: exists already" in capsys.readouterr().err


def test_refusals_are_one_line(run, hub, tmp_path, capsys, monkeypatch):
    for words, text in (
        (["push", str(run), "--repo", "name"], "--repo: 'name' is no name of a repository (give OWNER/NAME)"),
        (["push", str(run), "--repo", "a/b/c"], "is no name of a repository"),
        (["push", str(run), "--repo", "others/x"], "others/x: cannot be written: 403 Forbidden"),
        (["push", str(tmp_path / "nothing"), "--repo", "a/b"], "no such run folder"),
    ):
        assert main(words) == 2
        error = capsys.readouterr().err
        assert text in error and len(error.splitlines()) == 1
    with pytest.raises(WeightsError, match="someone/nothing: no such run, file or folder here, and it cannot be fetched"):
        torchtitan_dit.load("someone/nothing")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert main(["push", str(run), "--repo", "a/b"]) == 2
    assert "-m pip install datasets huggingface_hub" in capsys.readouterr().err
