"""Record that travels with weights: in a file's header and a checkpoint's state, written and read back."""

import dataclasses
import json
import shutil
import tomllib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tomli_w
import torch
from PIL import Image
from safetensors.torch import save_file

from tests.configurations import load
from torchtitan.config.job import ConfigError, load_config
from torchtitan.config.latent_cache import trained_info
from torchtitan.data.captioned_folder import CaptionedFolderConfig
from torchtitan.data.synthetic import text_kind
from torchtitan.errors import CheckpointError
from torchtitan.models.adapters.config import LoRAConfig
from torchtitan.settings.record import CONFIG_HEADER, effective
from torchtitan.weights import initial_weights, model_record
from torchtitan.weights.model_record import (
    CONFIG,
    RECORD,
    load_record,
    record_as_trained,
    record_of,
    record_of_checkpoint,
    record_of_weights,
    trained_for,
)
from torchtitan.weights.network import network_on_meta
from torchtitan.weights.trained_model import read_config

RUN = """
[data]
name = "image_folder"
path = "pictures"
image_size = 16
[sampling]
enable = false
[validation]
enable = false
"""
# As files and checkpoints had it while the record was a dataset.
EARLIER = """
[data]
name = "recorded"
labels = true
shape = [3, 16, 16]
num_classes = 2
[sampling]
enable = false
"""
LATENTS = {"shape": [4, 8, 8], "num_classes": 2, "class_names": ["a", "b"], "shift": [1.0, 0.0, 0.0, 0.0],
           "scale": [0.5, 1.0, 1.0, 1.0], "encoder": '{"name": "taef2", "downscale": 8}', "image_size": 64}  # fmt: skip


@pytest.fixture
def unsampled(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("cats", "dogs"):
        (tmp_path / "pictures" / name).mkdir(parents=True)
        Image.fromarray(np.zeros((16, 16, 3), np.uint8)).save(tmp_path / "pictures" / name / "0.png")
    return load(RUN)


def test_a_file_of_a_run_without_samples_is_read(unsampled):
    save_file({"x": torch.zeros(1)}, "weights.safetensors", record_of(unsampled).header())
    shutil.rmtree("pictures")
    found = record_of_weights(Path("weights.safetensors"))
    assert found.elsewhere and found.latents is None
    assert (found.info.image_shape, found.info.class_names) == ((3, 16, 16), ("cats", "dogs"))


def test_the_tracks_that_a_header_names_need_no_section_of_averages(unsampled, monkeypatch):
    tracks = '[[ema.tracks]]\nname = "fast"\n[[ema.tracks]]\nname = "long"\n'
    sampling = '[sampling]\nema_track = "fast"\nguide_track = "long"\n'
    config = load(RUN.replace("[sampling]\nenable = false\n", tracks + sampling))
    save_file({"x": torch.zeros(1)}, "weights.safetensors", record_of(config).header())
    found = record_of_weights(Path("weights.safetensors")).config.sampling
    assert (found.ema_track, found.guide_track) == ("fast", "long")


def test_a_record_of_latents_has_their_normalisation_and_autoencoder_and_is_written_again_as_it_was_read():
    found = load_record({"model": {"patch_size": 2}, "data": LATENTS}, "x")
    assert (found.latents.normalization.shift, found.latents.normalization.scale) == (LATENTS["shift"], LATENTS["scale"])
    assert found.latents.autoencoder == json.loads(LATENTS["encoder"]) and found.latents.image_size == 64
    assert found.data_table() == LATENTS and tomllib.loads(found.header()[CONFIG])["data"] == LATENTS
    earlier = load_record({"data": {"name": "recorded_latents", "shape": [4, 8, 8], "shift": [], "scale": []}}, "x")
    assert earlier.latents.normalization.scale == [1.0] * 4 and earlier.latents.autoencoder == {"name": "unknown"}


def test_a_header_names_no_place_that_is_opened(tmp_path):
    path = tmp_path / "weights.safetensors"
    text = EARLIER + '[objective.timesteps]\nname = "slots"\nedges = [0.0, 0.5, 1.0]\nedges_path = "edges.json"\n'
    text += '[lora]\nenable = true\ninitial_adapter = "a.safetensors"\n[checkpoint]\ninitial_weights = "b.safetensors"\n'
    save_file({"x": torch.zeros(1)}, path, {CONFIG: text})
    found = record_of_weights(path).config
    assert not (found.lora.enable or found.checkpoint.initial_weights or found.objective.timesteps.edges_path)
    assert found.data.path == ""
    for data in ('name = "image_folder"\npath = "pictures"', 'name = "huggingface"\npath = "owner/name"', 'name = ["recorded"]'):
        save_file({"x": torch.zeros(1)}, path, {CONFIG: f"[data]\n{data}\n"})
        assert record_of_weights(path) is None


@pytest.mark.parametrize("change, text", [
    ({"shape": [4, 0, 8]}, "x: data.shape: [4, 0, 8] is not three positive numbers: channels, height, width"),
    ({"scale": [1.0]}, "x: data.scale: 1 numbers for 4 channels"),
])  # fmt: skip
def test_a_record_that_describes_no_data_is_refused(change, text):
    with pytest.raises(ConfigError) as refused:
        load_record({"data": LATENTS | change}, "x")
    assert str(refused.value).startswith(text) and len(refused.value.problems) == 1


@pytest.mark.parametrize("with_folder", [True, False])
def test_a_checkpoint_of_a_run_without_samples_is_read_where_its_data_are_gone(unsampled, monkeypatch, tmp_path, with_folder):
    tables = effective(unsampled)
    state = {RECORD: record_of(unsampled).data_table(), "config": tables}
    monkeypatch.setattr(model_record, "read_state", lambda checkpoint: state)
    shutil.rmtree("pictures")
    if with_folder:
        (tmp_path / "config.toml").write_text(tomli_w.dumps({name: table for name, table in tables.items() if table}))
    found = record_of_checkpoint(tmp_path, tmp_path / "step-2")
    assert found.elsewhere and found.info.num_classes == 2 and found.config.data.path == ""


def test_a_checkpoint_that_was_trained_with_other_keys_than_its_run_has_now_is_read_with_them(unsampled, monkeypatch, tmp_path):
    tables, now = effective(unsampled), record_of(unsampled)
    state = {RECORD: now.data_table(), "config": tables | {"objective": tables["objective"] | {"prediction": "x0"}}}
    monkeypatch.setattr(model_record, "read_state", lambda checkpoint: state)
    (tmp_path / "config.toml").write_text(tomli_w.dumps({name: table for name, table in tables.items() if table}))
    found, said = record_as_trained(tmp_path, tmp_path / "step-2", now)
    assert found.config.objective.prediction == "x0" and "trained with another objective.prediction than the run has now" in said
    state["config"] = tables
    assert record_as_trained(tmp_path, tmp_path / "step-2", now) == (now, "")
    state["config"] = tables | {"lora": {"enable": True, "base_dtype": "int8"}}
    merging = LoRAConfig(enable=True, base_dtype="bfloat16")
    of_copy = dataclasses.replace(now, config=dataclasses.replace(now.config, lora=merging))
    assert "(the run's is used)" in record_as_trained(tmp_path, tmp_path / "step-2", of_copy)[1]
    state["config"]["lora"]["rank"] = 3
    found, _ = record_as_trained(tmp_path, tmp_path / "step-2", of_copy)
    assert (found.config.lora.base_dtype, found.config.lora.rank) == ("bfloat16", 3)  # to merge


def test_a_run_of_an_earlier_version_is_read_without_the_keys_that_are_no_more(tmp_path, caplog):
    path = tmp_path / "config.toml"
    own = '[data]\nname = "digits"\n[sampling]\nnum_steps = 7\njudge_images = 100\n[gns]\nenable = false\ngrow = 2\n'
    path.write_text(CONFIG_HEADER + own)
    assert read_config(path).sampling.num_steps == 7
    assert "are left out: sampling.judge_images = 100" in caplog.text and "gns.grow" not in caplog.text
    path.write_text(own)  # by hand: it may be a typing error
    with pytest.raises(ConfigError, match="sampling.judge_images: unknown key"):
        read_config(path)


def test_weights_of_latents_in_another_scale_are_named(tmp_path, monkeypatch):
    path = tmp_path / "base.safetensors"
    save_file({"w": torch.zeros(1)}, path, {"config": "[data]\nshift = [0.0, 1.0]\nscale = [2.0, 2.0]"})
    here = SimpleNamespace(shift=[0.0, 1.0], scale=[2.0, 2.0])
    store = SimpleNamespace(index=SimpleNamespace(normalization=here))
    monkeypatch.setattr(initial_weights, "store_of_latents", lambda config: store)
    assert initial_weights._other_latents(path, None) == ""
    here.scale = [2.0, 2.5]
    adapted, trained = (SimpleNamespace(lora=LoRAConfig(enable=lora), data=CaptionedFolderConfig()) for lora in (True, False))
    line = initial_weights._other_latents(path, adapted)
    advice = "draw with this run, not with that file and --lora"
    assert line == f"its latents had scale 2, 2, the run's latents have scale 2, 2.5 ({advice})"
    pixels = tmp_path / "pixels.safetensors"
    save_file({"w": torch.zeros(1)}, pixels, {"config": "[data]\nshape = [2, 8, 8]"})
    assert initial_weights._other_latents(pixels, trained) == (
        "its pixels had shift 0, 0, scale 1, 1, the run's latents have shift 0, 1, scale 2, 2.5 "
        "(the network has to adapt to that)"
    )
    monkeypatch.setattr(initial_weights, "store_of_latents", lambda config: None)
    assert initial_weights._other_latents(pixels, adapted) == ""
    line = initial_weights._other_latents(path, adapted)
    assert line.endswith("; with cache.enable, and its autoencoder, they are the file's)")


def test_weights_of_texts_of_another_length_are_named(tmp_path):
    path = tmp_path / "base.safetensors"
    save_file({"w": torch.zeros(1)}, path, {"config": "[data]\ntext_length = 8\n"})
    info = SimpleNamespace(condition_kind=text_kind(SimpleNamespace(text_length=8, text_dim=4, pooled_dim=2), torch.float32))
    assert initial_weights._other_texts(path, info) == ""
    info.condition_kind = text_kind(SimpleNamespace(text_length=32, text_dim=4, pooled_dim=2), torch.float32)
    assert initial_weights._other_texts(path, info).startswith("its texts had 8 tokens, the run's have 32 (")


def test_weights_of_another_objective_are_named(tmp_path):
    path = tmp_path / "base.safetensors"
    run = load_config(["--model.flavor", "debug", "--data.name", "synthetic"], 1)
    for header, told in (({}, False), ({"trained_for": trained_for(run)}, False), ({"trained_for": "trained for x0"}, True)):
        save_file({"w": torch.zeros(1)}, path, header)
        line = initial_weights._other_objective(path, run)
        assert line == (f"its network was trained for x0; this run's is {trained_for(run)}" if told else "")


def test_the_network_of_a_file_differs_by_what_its_header_says(tmp_path):
    words = ["--data.name", "synthetic", "--model.flavor", "debug", "--model.routing.name", "tread", "--model.num_layers", "6"]
    config, path = load_config(words, 1), tmp_path / "x.safetensors"
    save_file({"x": torch.zeros(1)}, path, metadata=record_of(config).header())
    assert initial_weights._differing_network(path, config.model) == ""
    other = load_config([*words, "--model.routing.first_block", "1", "--model.label_dropout", "0.2"], 1)
    with pytest.raises(CheckpointError) as refused:
        initial_weights.check_own(path, network_on_meta(other, trained_info(other)))
    assert str(refused.value).endswith("\n" + f"{path}: its network has model.routing.first_block = 3 (the run's: 1)")
