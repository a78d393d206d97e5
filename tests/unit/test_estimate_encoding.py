"""Estimates of runs that encode their images: published layers, and what is assumed and said without data and weights."""

import json

import pytest
import torch
from PIL import Image
from torch.utils.flop_counter import FlopCounterMode

from tests.decoding import SIDE, write_encoded_store
from tests.launcher import ROOT
from torchtitan.alignment.config import AlignmentConfig
from torchtitan.alignment.plan import open_encoder
from torchtitan.autoencoders import build_autoencoder
from torchtitan.config.job import load_config
from torchtitan.estimate.absent_data import PUBLISHED
from torchtitan.estimate.pixels import pixel_warning
from torchtitan_dit.commands import estimate

META, PIXELS = torch.device("meta"), (3, 256, 256)
SMALL = [
    "--model.dim", "64", "--model.num_layers", "2", "--model.num_heads", "4", "--model.mlp_hidden_dim", "128",
    "--training.global_batch_size", "8", "--compile.enable", "false",
]  # fmt: skip


def said(capsys):
    """What a command printed, and its last line of stderr, before which packages may warn of each other."""
    out, err = capsys.readouterr()
    return out, err.splitlines()[-1]


def count(network):
    return sum(parameter.numel() for parameter in network.parameters())


def test_published_layers_have_published_counts():
    pytest.importorskip("diffusers"), pytest.importorskip("transformers")
    names = ("sd-vae-ft-ema", "e2e-invae-hf")
    sd_vae, in_vae = (build_autoencoder("diffusers", str(PUBLISHED / name), device="meta") for name in names)
    assert (count(sd_vae), count(in_vae)) == (83_653_863, 69_836_067)
    with FlopCounterMode(display=False) as counter:
        latents = in_vae.encode(torch.empty(1, *PIXELS, device="meta")).mean
        in_vae.decode(latents)
    assert counter.get_total_flops() == 390_131_613_696  # that of another implementation
    teacher = open_encoder(AlignmentConfig(teacher="transformers", path=str(PUBLISHED / "dinov2-base")), META)
    assert count(teacher) == 86_580_480
    rae = build_autoencoder("rae", str(PUBLISHED / "rae"), device="meta")
    assert count(rae.model.encoder) == count(teacher) + 4 * 768 - 2 * 768  # registers, and no gain and bias of the last norm
    tokens = 5 + 16**2
    flops = 2 * 12 * tokens * (12 * 768**2 + 2 * tokens * 768) + 2 * 16**2 * 3 * 14**2 * 768
    with FlopCounterMode(display=False) as counter:
        assert rae.encode(torch.empty(1, *PIXELS, device="meta")).mean.shape == (1, 768, 16, 16)
    assert counter.get_total_flops() == flops


def test_a_run_is_estimated_without_its_images_weights_and_teacher(monkeypatch, tmp_path, capsys):
    pytest.importorskip("diffusers"), pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    words = [str(ROOT / "train_configs" / "imagenet256" / "sit_b2_repa.toml"), "--world-size", "1", "--device", "H200", *SMALL]
    assert estimate.main([*words, "--alignment.block", "1", "--json"]) == 0
    out, note = said(capsys)
    assumed = "3 x 256 x 256 pixels, latents of 4 x 32 x 32, and 1000 classes are assumed ("
    assert note.startswith(f"./downloads/imagenet: not here; {assumed}")
    found = json.loads(out)
    assert found["encoding_flops_per_image"] / 2e9 == pytest.approx(136.361, abs=1e-3)
    assert found["memory"]["phase"] == "encode"
    assert found["memory"]["parameters"] > 2 * 83_653_863 + 4 * 86_580_480  # the autoencoder is in bfloat16
    time = found["time"]
    assert time["step"] == pytest.approx(max(time["compute"], time["communication"]) + time["optimizer"] + time["encoding"])
    assert time["hours"] == pytest.approx(400_000 * time["step"] / 3600)
    assert estimate.main([*words, "--alignment.teacher", "none"]) == 0
    out, _ = capsys.readouterr()
    assert "(training), 2.727e+11 (encoding)" in out and "s, of images to latents" in out


def test_a_store_and_layers_that_are_not_here_are_named(tmp_path, capsys):
    pytest.importorskip("diffusers")
    (tmp_path / "pictures").mkdir()
    for number in range(20):
        Image.new("RGB", (SIDE, SIDE), (number, 0, 0)).save(tmp_path / "pictures" / f"{number}.png")
    (tmp_path / "run.toml").write_text("[model]\nflavor = 'debug'\nnum_layers = 1\n")
    write_encoded_store(tmp_path / "store", tmp_path / "tokenizer", num_images=4)
    words = [
        "--data.name", "image_folder", "--data.path", str(tmp_path / "pictures"), "--data.image_size", str(SIDE),
        "--autoencoder.encode", "true", "--autoencoder.name", "cosmos", "--autoencoder.path", str(tmp_path / "tokenizer"),
        "--autoencoder.statistics", str(tmp_path / "store"), "--training.local_batch_size", "4",
    ]  # fmt: skip
    given = [str(tmp_path / "run.toml"), "--world-size", "1", "--device", "H100"]
    assert estimate.main([*given, *words]) == 0
    out, line = said(capsys)
    assert "encoding" not in out
    reason = "cosmos: its layers are in the files of its weights"
    assert line == f"autoencoder.encode: its memory and time are not counted ({reason})"
    config = load_config([*words, "--model.patch_size", "1"], 1)
    config.data.image_size = 8 * SIDE
    assert not pixel_warning(config, 1)  # the network sees 1,024 tokens
    words += ["--autoencoder.name", "diffusers", "--autoencoder.statistics", "none"]
    words += ["--autoencoder.path", "nowhere/sd-vae-ft-ema"]
    assert estimate.main([*given, *words]) == 0
    assert said(capsys)[1] == "none: not here; 4 x 4 x 4 are assumed"
    assert estimate.main([*given, *words, "--autoencoder.path", "nowhere/another"]) == 2
    assert "autoencoder.statistics: none" in capsys.readouterr().err
