"""Representation autoencoders: diffusers' own numbers, statistics of each element through store, record and decoder."""

import copy
import json

import numpy as np
import pytest
import torch

from tests.latent_stores import SHAPE, plan_of, write_store
from torchtitan.autoencoders import build_autoencoder
from torchtitan.autoencoders.base import AutoencoderError, denormalize, normalize
from torchtitan.config.job import JobConfig
from torchtitan.data import dataset_info
from torchtitan.data.latents import Latents, LatentsConfig
from torchtitan.latents import LatentStore, Normalization
from torchtitan.weights.model_record import load_record, record_of

SIDE, GRID, WIDTH = 32, 4, 64
IMAGES = torch.rand(2, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0)) * 2 - 1


@pytest.fixture(scope="module")
def rae(tmp_path_factory):
    """A small AutoencoderRAE with random weights and statistics of each element, and its folder."""
    diffusers = pytest.importorskip("diffusers")
    folder = tmp_path_factory.mktemp("rae")
    torch.manual_seed(3)
    shape = (WIDTH, GRID, GRID)
    model = diffusers.AutoencoderRAE(
        encoder_hidden_size=WIDTH, encoder_patch_size=7, encoder_num_hidden_layers=2, encoder_input_size=28, patch_size=8,
        decoder_hidden_size=32, decoder_num_hidden_layers=2, decoder_num_attention_heads=2, decoder_intermediate_size=48,
        latents_mean=torch.randn(shape), latents_std=torch.rand(shape) + 0.5, scaling_factor=0.8,
    ).eval()  # fmt: skip
    torch.nn.init.normal_(model.decoder.decoder_pred.weight, std=0.2)
    model.save_pretrained(folder)
    return model, folder


def test_encode_and_decode_are_those_of_diffusers(rae):
    model, folder = rae
    autoencoder = build_autoencoder("rae", str(folder))
    assert (autoencoder.channels, autoencoder.downscale) == (WIDTH, 8)
    with torch.no_grad():
        expected = model.encode((IMAGES + 1) / 2).latent
        decoded = model.decode(expected).sample * 2 - 1
    latents = autoencoder.encode(IMAGES)
    assert latents.std is None and list(latents.mean.shape) == [2, WIDTH, GRID, GRID]
    assert (latents.mean - expected).abs().max() > 0.5  # raw: the statistics are not applied yet
    normalized = normalize(latents.mean, autoencoder.normalization)
    torch.testing.assert_close(normalized, expected, rtol=0, atol=1e-6)
    images = autoencoder.decode(denormalize(expected, autoencoder.normalization))
    torch.testing.assert_close(images, decoded.clamp(-1, 1), rtol=0, atol=1e-6)
    assert 0.1 < images.std() and (images.abs() < 1).float().mean() > 0.2
    torch.testing.assert_close(autoencoder.encode(IMAGES).mean, latents.mean, rtol=0, atol=0)


def test_other_sizes_and_models_are_refused_in_one_line(rae, tmp_path):
    _, folder = rae
    autoencoder = build_autoencoder("rae", str(folder))
    with pytest.raises(AutoencoderError, match="images of 32 x 32 pixels, not 32 x 40"):
        autoencoder.encode(torch.zeros(1, 3, 32, 40))
    with pytest.raises(AutoencoderError, match="latents of 4 x 4, not 4 x 8"):
        autoencoder.decode(torch.zeros(1, WIDTH, 4, 8))
    (tmp_path / "config.json").write_text(json.dumps({"_class_name": "AutoencoderKL"}))
    with pytest.raises(AutoencoderError, match="describes AutoencoderKL; AutoencoderRAE can be used"):
        build_autoencoder("rae", str(tmp_path))


def test_statistics_are_part_of_the_identity_and_absent_where_the_model_has_none(rae, tmp_path):
    model, folder = rae
    model._latents_mean.add_(1)
    try:
        model.save_pretrained(tmp_path / "other")
    finally:
        model._latents_mean.sub_(1)
    one, other = (build_autoencoder("rae", str(place)) for place in (folder, tmp_path / "other"))
    assert one.weights_sha256 != other.weights_sha256
    assert other.normalization["shift"][0] == pytest.approx(one.normalization["shift"][0] + 1, abs=1e-6)
    copy.deepcopy(model).half().save_pretrained(tmp_path / "half")
    with pytest.raises(AutoencoderError, match=r"_latents_(mean|std) is in half precision \(F16; save these two in float32\)"):
        build_autoencoder("rae", str(tmp_path / "half"))
    type(model)(**{**model.config, "latents_mean": None, "latents_std": None}).save_pretrained(tmp_path / "none")
    assert build_autoencoder("rae", str(tmp_path / "none")).normalization is None


def test_statistics_of_each_element_reach_training_and_the_record_of_the_weights(tmp_path):
    shift, scale = torch.randn(SHAPE, dtype=torch.float64), torch.rand(SHAPE, dtype=torch.float64) + 0.5
    numbers = {"shift": shift.flatten().tolist(), "scale": scale.flatten().tolist()}
    write_store(tmp_path, plan_of(posterior=False, normalization=Normalization(**numbers, source="autoencoder")))
    config = LatentsConfig(path=str(tmp_path), validation_fraction=0.0)
    raw = LatentStore(tmp_path).read(np.arange(5))[0][:, 0]
    batch = Latents(config, "train").fetch(np.arange(5))
    torch.testing.assert_close(batch["images"].double(), (raw.double() - shift) * scale, rtol=0, atol=1e-5)
    torch.testing.assert_close(denormalize(batch["images"], numbers), raw, rtol=0, atol=1e-5)
    record = record_of(JobConfig(data=config), dataset_info(config))
    loaded = load_record({"data": record.data_table()}, "weights").latents
    assert loaded.normalization.shift == numbers["shift"] and loaded.normalization.scale == numbers["scale"]
