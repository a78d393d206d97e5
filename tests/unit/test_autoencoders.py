"""The contract of autoencoders, the identity and TAEF2, tiling of large images, figures of reconstruction."""

import hashlib
import math

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional

from tests.unit.autoencoder_files import write_taef2
from torchtitan.autoencoders import build_autoencoder
from torchtitan.autoencoders.base import Autoencoder, AutoencoderError, Latents
from torchtitan.autoencoders.reconstruction import psnr, side_by_side
from torchtitan.autoencoders.tiling import TiledAutoencoder, ramp, spans
from torchtitan.files.weight_hash import weights_sha256

IMAGES = torch.rand(2, 3, 32, 48, generator=torch.Generator().manual_seed(0)) * 2 - 1


@pytest.fixture(scope="module")
def taef2(tmp_path_factory):
    folder = tmp_path_factory.mktemp("taef2")
    return folder, write_taef2(folder)


def test_identity_gives_pixels_as_latents_and_clamps_what_it_decodes():
    identity = build_autoencoder("identity")
    latents = identity.encode(IMAGES)
    assert torch.equal(latents.mean, IMAGES) and latents.std is None
    assert torch.equal(identity.decode(3 * IMAGES), (3 * IMAGES).clamp(-1, 1))
    assert identity.identity()["sha256"] == hashlib.sha256().hexdigest()


@pytest.mark.parametrize(
    ("name", "path", "dtype", "message"),
    [
        ("vqgan", "", None, "identity, cosmos, diffusers, rae, taef2"),
        ("taef2", "", None, "taef2_encoder.safetensors"),
        ("taef2", "", torch.float16, "float32 or bfloat16"),
        ("cosmos", "", None, "give a folder or a name"),
    ],
)
def test_what_cannot_be_opened_is_one_line_with_the_way_out(name, path, dtype, message):
    with pytest.raises(AutoencoderError) as raised:
        build_autoencoder(name, path, dtype)
    assert message in str(raised.value) and "\n" not in str(raised.value)


def test_wrong_shapes_are_refused(taef2):
    autoencoder = build_autoencoder("taef2", str(taef2[0]))
    for images in (IMAGES[0], IMAGES[:, :1], IMAGES[..., :44], IMAGES[:0]):
        with pytest.raises(AutoencoderError, match="taef2 encodes images"):
            autoencoder.encode(images)
    with pytest.raises(AutoencoderError, match=r"latents \[B, 32, h, w\]"):
        autoencoder.decode(torch.zeros(1, 16, 4, 4))


def convolve(x, tensors, name, stride=1):
    return functional.conv2d(x, tensors[f"{name}.weight"], tensors.get(f"{name}.bias"), stride, padding=1)


def block(x, tensors, index):
    if f"{index}.pool.0.weight" in tensors:
        wide = functional.conv2d(x, tensors[f"{index}.pool.0.weight"])
        groups = wide.reshape(len(x), 4, -1)
        centred = groups - groups.mean(2, keepdim=True)
        normed = (centred / (centred.square().mean(2, keepdim=True) + 1e-5).sqrt()).reshape(wide.shape)
        scale, shift = (tensors[f"{index}.pool.1.{part}"][:, None, None] for part in ("weight", "bias"))
        normed = normed * scale + shift
        x = x + functional.conv2d(normed.relu(), tensors[f"{index}.pool.3.weight"])
    inner = convolve(convolve(x, tensors, f"{index}.conv.0").relu(), tensors, f"{index}.conv.2").relu()
    return (convolve(inner, tensors, f"{index}.conv.4") + x).relu()


def published_encoder(x, tensors):
    """The published list of steps, in float64."""
    x = block(convolve(x, tensors, 0), tensors, 1)
    for halving in (2, 6, 10):
        x = convolve(x, tensors, halving, stride=2)
        for index in (halving + 1, halving + 2, halving + 3):
            x = block(x, tensors, index)
    return convolve(x, tensors, 14)


def published_decoder(z, tensors):
    x = convolve(3 * (z / 3).tanh(), tensors, 1).relu()
    for first, doubling in ((3, 6), (8, 11), (13, 16)):
        for index in (first, first + 1, first + 2):
            x = block(x, tensors, index)
        x = convolve(x.repeat_interleave(2, 2).repeat_interleave(2, 3), tensors, doubling + 1)
    return convolve(block(x, tensors, 18), tensors, 19)


def test_taef2_computes_the_published_steps(taef2):
    folder, written = taef2
    autoencoder = build_autoencoder("taef2", str(folder))
    doubles = {part: {name: t.double() for name, t in tensors.items()} for part, tensors in written.items()}
    latents = autoencoder.encode(IMAGES)
    expected = published_encoder((IMAGES.double() + 1) / 2, doubles["encoder"])
    assert latents.mean.shape == (2, 32, 4, 6) and latents.std is None
    torch.testing.assert_close(latents.mean.double(), expected, rtol=0, atol=1e-5 * expected.abs().max().item())
    decoded = published_decoder(expected, doubles["decoder"])
    images = autoencoder.decode(expected.float()).double()
    torch.testing.assert_close(images, (decoded * 2 - 1).clamp(-1, 1), rtol=0, atol=1e-5)
    assert images.std() > 0.05 and (images.abs() < 1).float().mean() > 0.2  # not everything is clamped away


def test_bfloat16_is_near_and_is_the_same_autoencoder(taef2):
    exact, rounded = (build_autoencoder("taef2", str(taef2[0]), dtype) for dtype in (None, torch.bfloat16))
    latents, near = exact.encode(IMAGES).mean, rounded.encode(IMAGES).mean
    assert near.dtype == torch.float32 and 1e-5 < (near - latents).norm() / latents.norm() < 0.1
    assert rounded.identity() == exact.identity()


def test_an_autoencoder_stays_in_eval_mode_without_gradients(taef2):
    autoencoder = build_autoencoder("taef2", str(taef2[0]))
    nn.Sequential(autoencoder).train()
    assert not any(module.training for module in autoencoder.modules())
    assert not autoencoder.encode(IMAGES.clone().requires_grad_()).mean.requires_grad
    assert not any(parameter.requires_grad for parameter in autoencoder.parameters())


def test_torch_files_of_the_source_give_the_same_autoencoder(taef2, tmp_path):
    folder, written = taef2
    for part, tensors in written.items():
        torch.save(tensors, tmp_path / f"taef2_{part}.pth")
    assert build_autoencoder("taef2", str(tmp_path)).identity() == build_autoencoder("taef2", str(folder)).identity()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda file: file.unlink(), "taef2_decoder.safetensors or taef2_decoder.pth"),
        (lambda file: file.write_bytes(file.read_bytes()[:5000]), "not a readable safetensors file"),
        (lambda file: save_file(load_file(file) | {"19.bias": torch.zeros(4)}, file), "have another shape: 19.bias"),
    ],
)
def test_damaged_weights_are_refused_in_one_line(tmp_path, damage, message):
    write_taef2(tmp_path)
    damage(tmp_path / "taef2_decoder.safetensors")
    with pytest.raises(AutoencoderError, match=message) as raised:
        build_autoencoder("taef2", str(tmp_path))
    assert "\n" not in str(raised.value)


def test_hash_is_of_names_shapes_and_values_not_of_the_container():
    tensors = {"a": torch.randn(4, 6).half(), "b": torch.tensor(2)}
    same = {"b": torch.tensor(2.0), "a": tensors["a"].float().T.contiguous().T}
    assert weights_sha256(tensors) == weights_sha256(same)
    one_off = tensors["a"].clone()
    one_off[3, 5] += 1e-3
    for other in ({**tensors, "a": one_off}, {**tensors, "a": tensors["a"].reshape(6, 4)}, {"a": tensors["a"]},
                  {"a": tensors["a"], "c": tensors["b"]}):
        assert weights_sha256(other) != weights_sha256(tensors)


class Local(Autoencoder):
    """A stand-in whose outputs see few pixels around them: one latent position to each side, both ways."""

    name, channels, downscale = "local", 5, 4

    def __init__(self) -> None:
        super().__init__(torch.float32, torch.device("cpu"))
        torch.manual_seed(3)
        self.down = nn.Sequential(nn.Conv2d(3, 5, 4, 4), nn.Tanh(), nn.Conv2d(5, 10, 3, padding=1))
        self.up = nn.Sequential(nn.Conv2d(5, 5, 3, padding=1), nn.Tanh(), nn.ConvTranspose2d(5, 3, 4, 4))
        self.weights_sha256 = weights_sha256(self.state_dict())
        self.freeze()

    def _encode(self, images):
        mean, log_std = self.down(images).chunk(2, 1)
        return Latents(mean, log_std.exp())

    def _decode(self, latents):
        return self.up(latents)


def test_what_fits_one_tile_is_equal_bit_for_bit():
    whole = Local()
    tiled = TiledAutoencoder(whole, tile=48, overlap=16)
    expected, latents = whole.encode(IMAGES), tiled.encode(IMAGES)
    assert torch.equal(latents.mean, expected.mean) and torch.equal(latents.std, expected.std)
    assert torch.equal(tiled.decode(latents.mean), whole.decode(latents.mean))
    assert tiled.identity() == whole.identity()


def test_tiles_give_the_whole_image_but_for_what_a_cut_can_reach():
    whole = Local()
    tiled = TiledAutoencoder(whole, tile=32, overlap=12)  # of 18 x 26 latent positions: tiles of 8 that share 3 or more
    images = torch.rand(2, 3, 72, 104, generator=torch.Generator().manual_seed(1)) * 2 - 1
    expected, latents = whole.encode(images), tiled.encode(images)
    far_rows, far_columns = far_from_cuts(18, 8, 3), far_from_cuts(26, 8, 3)
    assert 6 <= far_rows.sum() < 18 and 8 <= far_columns.sum() < 26
    cut = whole.encode(images[..., :32]).mean[..., 7]  # what a tile says at its edge, where it misses a neighbour
    largest = (cut - expected.mean[..., 7]).abs().max()
    assert 0 < (latents.mean - expected.mean).abs().max() < largest / 3  # an edge weighs 1/6, a corner up to 11/36
    for got, wanted in ((latents.mean, expected.mean), (latents.std, expected.std)):
        torch.testing.assert_close(got[:, :, far_rows][..., far_columns], wanted[:, :, far_rows][..., far_columns])
    far_rows, far_columns = far_rows.repeat_interleave(4), far_columns.repeat_interleave(4)
    decoded, wanted = tiled.decode(expected.mean), whole.decode(expected.mean)
    assert decoded.shape == images.shape
    torch.testing.assert_close(decoded[:, :, far_rows][..., far_columns], wanted[:, :, far_rows][..., far_columns])


def far_from_cuts(length: int, tile: int, overlap: int) -> torch.Tensor:
    """Positions that no tile sees within one position of an edge at which it was cut."""
    far = torch.ones(length, dtype=torch.bool)
    for begin, end in spans(length, tile, overlap):
        if begin > 0:
            far[begin] = False
        if end < length:
            far[end - 1] = False
    return far


def test_blending_is_linear_and_sums_to_one():
    assert spans(26, 8, 3) == [(0, 8), (5, 13), (10, 18), (15, 23), (18, 26)]
    assert spans(8, 8, 3) == [(0, 8)] and spans(9, 8, 4) == [(0, 8), (1, 9)]
    left, right = ramp(0, 8, 13, 3, 2), ramp(5, 13, 13, 3, 2)
    torch.testing.assert_close(left[-6:], (torch.arange(6, 0, -1) - 0.5) / 6)
    torch.testing.assert_close(left[-6:] + right[:6], torch.ones(6))
    assert (left[:-6] == 1).all() and (right[6:] == 1).all()
    identity = TiledAutoencoder(build_autoencoder("identity"), tile=10, overlap=4)
    torch.testing.assert_close(identity.encode(IMAGES).mean, IMAGES)


def test_psnr_is_of_the_range_two_and_side_by_side_shows_three_cells_a_row():
    others = IMAGES.clone()
    others[1] += 0.02
    decibels = psnr(IMAGES, others)
    assert math.isinf(decibels[0])
    assert decibels[1].item() == pytest.approx(20 * math.log10(2 / 0.02), abs=1e-3)
    assert side_by_side(IMAGES, others, ["first", "second"]).size[0] > 3 * 2 * 48
