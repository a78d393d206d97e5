"""Models of the diffusers package through the contract: the same numbers, scale and shift of their configuration."""

import json
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from torchtitan.autoencoders import build_autoencoder
from torchtitan.autoencoders.base import AutoencoderError, denormalize, normalize
from torchtitan.autoencoders.diffusers_models import DiffusersAutoencoder

IMAGES = torch.rand(2, 3, 16, 24, generator=torch.Generator().manual_seed(0)) * 2 - 1
WEIGHTS = "diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def diffusers():
    return pytest.importorskip("diffusers")


@pytest.fixture(scope="module")
def kl(diffusers, tmp_path_factory):
    """A small AutoencoderKL with random weights, and the folder that it was saved to."""
    folder = tmp_path_factory.mktemp("kl")
    torch.manual_seed(11)
    model = diffusers.AutoencoderKL(
        block_out_channels=(8, 8, 16), norm_num_groups=4, latent_channels=6,
        down_block_types=["DownEncoderBlock2D"] * 3, up_block_types=["UpDecoderBlock2D"] * 3,
        scaling_factor=1.5305, shift_factor=0.0609, sample_size=16,
    ).eval()  # fmt: skip
    model.save_pretrained(folder)
    return model, folder


def copy_with(folder, target, **changes):
    """The same weights with other entries in config.json."""
    target.mkdir(parents=True)
    config = json.loads((folder / "config.json").read_text()) | changes
    (target / "config.json").write_text(json.dumps(config))
    (target / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes())
    return str(target)


def test_kl_gives_the_mean_and_std_and_images_of_diffusers(kl):
    model, folder = kl
    autoencoder = build_autoencoder("diffusers", str(folder))
    assert (autoencoder.channels, autoencoder.downscale) == (6, 4)
    latents = autoencoder.encode(IMAGES)
    with torch.no_grad():
        posterior = model.encode(IMAGES).latent_dist
        decoded = model.decode(posterior.mean).sample
    torch.testing.assert_close(latents.mean, posterior.mean, rtol=0, atol=1e-6)
    torch.testing.assert_close(latents.std, posterior.std, rtol=0, atol=1e-6)
    assert latents.std.std() > 1e-3
    images = autoencoder.decode(latents.mean)
    torch.testing.assert_close(images, decoded.clamp(-1, 1), rtol=0, atol=1e-6)


def test_scale_and_shift_are_those_of_the_configuration(kl, tmp_path):
    _, folder = kl
    raw = build_autoencoder("diffusers", str(folder)).encode(IMAGES).mean
    for number, (changes, expected) in enumerate((
        ({}, (raw - 0.0609) * 1.5305),
        ({"shift_factor": None, "scaling_factor": 0.18215}, raw * 0.18215),
        ({"latents_mean": [0.5] * 6, "latents_std": [4.0] * 6, "shift_factor": None}, (raw - 0.5) * 1.5305 / 4),
    )):  # fmt: skip
        autoencoder = build_autoencoder("diffusers", copy_with(folder, tmp_path / str(number), **changes))
        normalized = normalize(raw, autoencoder.normalization)
        torch.testing.assert_close(normalized, expected)
        torch.testing.assert_close(denormalize(normalized, autoencoder.normalization), raw)
    without = build_autoencoder("diffusers", copy_with(folder, tmp_path / "without", scaling_factor=None))
    assert without.normalization is None


def test_bfloat16_is_the_same_autoencoder_and_a_pipeline_folder_is_looked_into(kl, tmp_path):
    _, folder = kl
    copy_with(folder, tmp_path / "pipeline" / "vae")
    exact = build_autoencoder("diffusers", str(folder))
    rounded = build_autoencoder("diffusers", str(tmp_path / "pipeline"), torch.bfloat16)
    assert rounded.identity() == exact.identity() and exact.identity()["kind"] == "AutoencoderKL"
    near, latents = rounded.encode(IMAGES), exact.encode(IMAGES)
    assert near.std.dtype == torch.float32
    assert 1e-5 < (near.mean - latents.mean).norm() / latents.mean.norm() < 0.1


def test_dc_is_deterministic(diffusers, tmp_path):
    torch.manual_seed(12)
    model = diffusers.AutoencoderDC(
        latent_channels=4, encoder_block_out_channels=(8, 16), decoder_block_out_channels=(8, 16),
        encoder_block_types="ResBlock", decoder_block_types="ResBlock", encoder_layers_per_block=(1, 1),
        decoder_layers_per_block=(1, 1), encoder_qkv_multiscales=((), ()), decoder_qkv_multiscales=((), ()),
        attention_head_dim=8, scaling_factor=0.41407, upsample_block_type="interpolate",
    ).eval()  # fmt: skip
    model.save_pretrained(tmp_path)
    autoencoder = build_autoencoder("diffusers", str(tmp_path))
    latents = autoencoder.encode(IMAGES)
    with torch.no_grad():
        expected = model.encode(IMAGES).latent
        decoded = model.decode(expected).sample
    assert latents.std is None and (autoencoder.channels, autoencoder.downscale) == (4, 2)
    torch.testing.assert_close(latents.mean, expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(autoencoder.decode(expected), decoded.clamp(-1, 1), rtol=0, atol=1e-6)
    assert autoencoder.normalization == {"shift": [0.0] * 4, "scale": [0.41407] * 4}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / WEIGHTS).unlink(), "cannot be loaded"),
        (lambda folder: (folder / "config.json").unlink(), "config.json: cannot be read"),
        (lambda folder: (folder / "config.json").write_text('{"_class_name": "VQModel"}'), "describes VQModel"),
        (lambda folder: change(folder, lambda tensors: tensors.pop("encoder.conv_in.bias")), "1 weights are missing"),
    ],
)
def test_incomplete_models_are_refused_in_one_line(kl, tmp_path, damage, message):
    folder = tmp_path / "model"
    copy_with(kl[1], folder)
    damage(folder)
    with pytest.raises(AutoencoderError, match=message) as raised:
        build_autoencoder("diffusers", str(folder))
    assert "\n" not in str(raised.value)


def change(folder, edit):
    tensors = load_file(folder / WEIGHTS)
    edit(tensors)
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})


def test_without_the_package_the_extra_is_named(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text('{"_class_name": "AutoencoderKL"}')
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(AutoencoderError, match="-m pip install 'diffusers>=0.32' huggingface_hub"):
        DiffusersAutoencoder(str(tmp_path), None, torch.device("cpu"))
