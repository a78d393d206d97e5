"""Captions encoded while a network trains: the same conditions as those of a store, and runs that train, resume and draw."""

import json
import pickle
import re
import shutil
import sys

import numpy as np
import pytest
import torch

from tests.refusals import one_line
from tests.unit.test_bucketed_stores import write_folder
from torchtitan.conditions import CAPTION, POOLED, TEXT, letters_of, texts_of
from torchtitan.config.job import ConfigError, load_config
from torchtitan.data.base import DatasetError
from torchtitan.data.captioned_folder import CaptionedFolder, CaptionedFolderConfig
from torchtitan.data.latents import Latents, LatentsConfig
from torchtitan.processes.launch import CHECKED
from torchtitan.run import run
from torchtitan_dit.commands import sample
from torchtitan_dit.commands.extract_latents import main as extract_latents

SIZES = [(32, 32)] * 7
KEYS = dict(text_encoder="stub:32", pooled_encoder="stub:24", text_length=6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("inputs") / "folder", SIZES)


def config_of(folder, **keys):
    return CaptionedFolderConfig(path=str(folder), **({"image_size": 16, "validation_fraction": 0.0} | KEYS | keys))


def test_letters_come_back_as_the_text_but_for_a_cut_end():
    texts = ["", "a cat", "ein Käse, 猫", "x" * 30]
    assert texts_of(letters_of(texts, 20)) == ["", "a cat", "ein Käse, 猫", "x" * 20]
    assert texts_of(letters_of(["aé"], 2)) == ["a"]


def test_texts_that_are_cut_are_said_though_the_configuration_was_checked(folder, caplog, monkeypatch):
    monkeypatch.setenv(CHECKED, "1")
    for text in ("one two three four five six seven", "seven six five four three two one"):
        CaptionedFolder.info(config_of(folder, text_length=4, prompts=[text]))
    assert caplog.messages == ["captions longer than data.text_length = 4 tokens are cut there"]


def test_conditions_are_those_of_a_store(folder, tmp_path):
    words = [
        "--output", str(tmp_path / "store"), "--autoencoder", "identity", "--num-workers", "0", "--data.name", "captioned_folder",
        "--data.path", str(folder), "--data.image_size", "16", "--data.validation_fraction", "0", "--null-caption", "nothing",
        "--text-encoder", "stub:32", "--pooled-encoder", "stub:24", "--text-length", "6", "--prompts", "one", "a photo of two",
    ]  # fmt: skip
    assert extract_latents(words) == 0
    stored = LatentsConfig(path=str(tmp_path / "store"), validation_fraction=0.0)
    config = config_of(folder, null_caption="nothing", prompts=["one", "a photo of two"])
    online, kind = CaptionedFolder.info(config).condition_kind, Latents.info(stored).condition_kind
    assert online.entries == kind.entries and online.names == kind.names
    for name in (TEXT, POOLED):
        assert torch.equal(online.nulls[name], kind.nulls[name]) and torch.equal(online.prompts[name], kind.prompts[name])
    indices = np.array([6, 0, 3, 0])
    batch = pickle.loads(pickle.dumps(CaptionedFolder(config, "train"))).fetch(indices)
    assert batch.keys() == {"images", CAPTION} == {"images", *pickle.loads(pickle.dumps(online)).batch_entries}
    wanted, found = Latents(stored, "train").fetch(indices), online.of(batch)
    assert all(torch.equal(found[name], wanted[name]) for name in (TEXT, POOLED))


def train(folder, output, *more):
    arguments = [
        "--model.name", "flux", "--model.flavor", "debug", "--model.patch_size", "4", "--model.label_dropout", "0.5",
        "--data.name", "captioned_folder", "--data.path", str(folder), "--data.image_size", "16", "--data.text_encoder",
        "stub:32", "--data.pooled_encoder", "stub:24", "--data.text_length", "6", "--data.validation_fraction", "0.3",
        "--job.dump_folder", str(output), "--job.name", "one", "--training.steps", "4", "--training.local_batch_size", "2",
        "--training.global_batch_size", "4", "--metrics.log_freq", "1", "--optimizer.lr", "0.01", "--checkpoint.interval", "2",
        "--validation.enable", "true", "--validation.interval", "2", "--validation.num_images", "2",
        "--sampling.interval", "4", "--sampling.num_steps", "2", "--sampling.images_per_class", "2", "--gns.enable", "false",
    ]  # fmt: skip
    assert run(load_config([*arguments, *more], 1)) == 0
    lines = (output / "one" / "metrics.jsonl").read_text().splitlines()
    kept = ("step", "loss", "grad_norm", "validation_metrics")
    return [{tag: value for tag, value in json.loads(line).items() if tag.startswith(kept)} for line in lines]


def test_a_run_resumes_with_loader_processes_and_draws_any_prompt(folder, tmp_path, monkeypatch, capsys):
    points = train(folder, tmp_path / "first")
    shutil.copytree(tmp_path / "first" / "one", tmp_path / "again" / "one")
    shutil.rmtree(tmp_path / "again" / "one" / "checkpoint" / "step-00000004")
    (tmp_path / "again" / "one" / "summary.json").unlink()
    assert train(folder, tmp_path / "again", "--data.num_workers", "1") == points
    source = str(tmp_path / "first" / "one")
    words = ["sample.py", source, "--num-steps", "2", "--images-per-class", "1", "--prompt", "new", "text"]
    monkeypatch.setattr(sys, "argv", words)
    assert sample.main() == 0
    (grid,) = (tmp_path / "first" / "one" / "samples" / "drawn").iterdir()
    assert re.fullmatch(r"grid-step-\d+-ema-seed-0\.png", grid.name)
    monkeypatch.setattr(sys, "argv", [*words, "--text-encoder", "stub:32"])
    assert sample.main() == 2 and "the run's data name their own encoders" in capsys.readouterr().err


@pytest.mark.parametrize(
    "keys, message",
    [
        (dict(pooled_encoder=""), "data.pooled_encoder: not given"),
        (dict(pooled_encoder="/no/folder"), "data.pooled_encoder: "),
    ],
)
def test_encoders_that_cannot_be_opened_are_refused_in_one_line(folder, keys, message):
    assert one_line(DatasetError, CaptionedFolder.info, config_of(folder, **keys)).startswith(message)


def test_texts_of_another_width_are_refused_before_training(folder):
    words = ["--model.name", "flux", "--model.flavor", "debug", "--data.name", "captioned_folder", "--data.path", str(folder)]
    with pytest.raises(ConfigError, match="model.text_dim: 32, and the data's text has width 16"):
        load_config([*words, "--data.image_size", "16", "--data.text_encoder", "stub:16", "--data.pooled_encoder", "stub:24"], 1)
