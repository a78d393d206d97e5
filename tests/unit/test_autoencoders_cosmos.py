"""TorchScript pairs as Cosmos tokenizers: dtype, probing, files that are no tokenizer, the package."""

import sys
from collections import OrderedDict
from types import ModuleType

import pytest
import torch
from torch import nn

from tests.unit.autoencoder_files import trace, write_tokenizer
from torchtitan.autoencoders import build_autoencoder
from torchtitan.autoencoders.base import AutoencoderError

IMAGES = torch.rand(2, 3, 16, 40, generator=torch.Generator().manual_seed(0)) * 2 - 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_latents_are_the_projections_in_the_dtype_of_the_trace(tmp_path, dtype):
    matrix = write_tokenizer(tmp_path, dtype)
    tokenizer = build_autoencoder("cosmos", str(tmp_path))
    assert (tokenizer.dtype, tokenizer.channels, tokenizer.downscale) == (dtype, 16, 8)
    latents = tokenizer.encode(IMAGES)
    patches = IMAGES.unfold(2, 8, 8).unfold(3, 8, 8)  # [B, 3, h, w, 8, 8]
    expected = torch.einsum("bchwij,kcij->bkhw", patches, matrix.reshape(16, 3, 8, 8))
    assert latents.std is None and latents.mean.dtype == torch.float32
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(latents.mean, expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(latents.mean, latents.mean.to(dtype).float())
    again = tokenizer.encode(tokenizer.decode(latents.mean)).mean  # decoding what lies in the rows' span is exact
    torch.testing.assert_close(again, latents.mean, rtol=10 * tolerance, atol=10 * tolerance)


def test_a_dtype_may_be_named_but_not_changed(tmp_path):
    write_tokenizer(tmp_path, torch.bfloat16)
    assert build_autoencoder("cosmos", str(tmp_path), torch.bfloat16).dtype == torch.bfloat16
    with pytest.raises(AutoencoderError, match="was made in bfloat16 and cannot compute in float32"):
        build_autoencoder("cosmos", str(tmp_path), torch.float32)


CONSTANT = torch.full((16, 3, 8, 8), 0.01, dtype=torch.bfloat16)


class Frozen(nn.Module):
    """A network whose weights became constants of the trace, and which takes images of any dtype."""

    def forward(self, x):
        return (nn.functional.conv2d(x.to(torch.bfloat16), CONSTANT, stride=8),)


def test_dtype_is_found_among_the_constants_where_there_are_no_weights(tmp_path):
    write_tokenizer(tmp_path, torch.bfloat16)
    trace(Frozen(), torch.zeros(1, 3, 16, 16, dtype=torch.bfloat16), tmp_path / "encoder.jit")
    tokenizer = build_autoencoder("cosmos", str(tmp_path))
    assert tokenizer.dtype == torch.bfloat16
    latents = tokenizer.encode(torch.ones(1, 3, 8, 8)).mean
    torch.testing.assert_close(latents, torch.full((1, 16, 1, 1), 192 * 0.01), rtol=0.01, atol=0)


def test_identity_follows_the_files_and_not_the_folder(tmp_path):
    write_tokenizer(tmp_path / "a")
    (tmp_path / "b").mkdir()
    for name in ("encoder.jit", "decoder.jit"):
        (tmp_path / "b" / name).write_bytes((tmp_path / "a" / name).read_bytes())
    write_tokenizer(tmp_path / "c", torch.bfloat16)
    a, b, c = (build_autoencoder("cosmos", str(tmp_path / name)).identity() for name in "abc")
    assert a == b != c
    assert a["name"] == "cosmos" and len(a["sha256"]) == 64


class Discrete(nn.Module):
    def forward(self, x):
        return x[:, :1, ::8, ::8].long(), x


class Video(nn.Module):
    def forward(self, x):
        return nn.functional.avg_pool3d(x, 8)


IMAGE, CLIP = torch.zeros(1, 3, 64, 64), torch.zeros(1, 3, 8, 64, 64)


@pytest.mark.parametrize(
    ("module", "example", "name", "message"),
    [
        (Discrete(), IMAGE, "encoder.jit", "a discrete tokenizer"),
        (Video(), CLIP, "encoder.jit", r"(does not encode images|but \[3, 8, 8\])"),
        (nn.Conv2d(4, 8, 3), torch.zeros(1, 4, 8, 8), "encoder.jit", "does not encode images"),
        (nn.Conv2d(16, 3, 1).bfloat16(), torch.zeros(1, 16, 8, 8).bfloat16(), "decoder.jit", "in float32"),
    ],
)
def test_torchscript_that_is_no_image_tokenizer_is_refused_in_one_line(tmp_path, module, example, name, message):
    write_tokenizer(tmp_path)
    trace(module, example, tmp_path / name)
    with pytest.raises(AutoencoderError, match=message) as raised:
        build_autoencoder("cosmos", str(tmp_path))
    assert name in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(("harm", "message"), [
    (lambda file: file.unlink(), "no such file"),
    (lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]), "not a TorchScript file"),
])  # fmt: skip
def test_files_that_are_no_torchscript_are_refused_in_one_line(tmp_path, harm, message):
    write_tokenizer(tmp_path)
    harm(tmp_path / "decoder.jit")
    with pytest.raises(AutoencoderError, match=message) as raised:
        build_autoencoder("cosmos", str(tmp_path))
    assert "\n" not in str(raised.value)


class Patcher(nn.Module):
    """Patches of 4 x 4 pixels times a buffer, which is no weight and keeps its dtype, as the published ones' wavelets do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor([0.5]))

    def forward(self, x):
        return nn.functional.pixel_unshuffle(x, 4) * self.scale.to(x.dtype)


class Attention(nn.Module):
    """Over all places of an image, at the size that the images have when it is called."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm, self.qkv = nn.GroupNorm(4, channels, eps=1e-6), nn.Conv2d(channels, 3 * channels, 1)

    def forward(self, x):
        b, c, h, w = x.shape
        q, k, v = (part.reshape(b, c, h * w) for part in self.qkv(self.norm(x)).chunk(3, dim=1))
        weights = torch.softmax(torch.bmm(q.transpose(1, 2), k) * 0.25, dim=2)
        return x + torch.bmm(v, weights.transpose(1, 2)).reshape(b, c, h, w)


class Distribution(nn.Module):
    """As of continuous tokenizers: the latents, and losses of none."""

    def forward(self, latents):
        return latents, (torch.tensor([0.0]), torch.tensor([0.0]))


def test_a_trace_in_the_layout_of_the_published_networks_computes_at_any_size(tmp_path):
    """Patches, attention and resampling, traced at another size in bfloat16."""
    torch.manual_seed(3)
    encoder = nn.Sequential(OrderedDict(
        encoder=nn.Sequential(Patcher(), nn.Conv2d(48, 16, 3, padding=1), nn.Conv2d(16, 16, 2, stride=2), Attention(16)),
        quant_conv=nn.Conv2d(16, 16, 1), distribution=Distribution(),
    )).bfloat16()  # fmt: skip
    decoder = nn.Sequential(OrderedDict(
        post_quant_conv=nn.Conv2d(16, 16, 1),
        decoder=nn.Sequential(Attention(16), nn.Upsample(scale_factor=2), nn.Conv2d(16, 48, 3, padding=1), nn.PixelShuffle(4)),
    )).bfloat16()  # fmt: skip
    encoder[0][0].float()
    trace(encoder, torch.zeros(1, 3, 32, 32, dtype=torch.bfloat16), tmp_path / "encoder.jit")
    trace(decoder, torch.zeros(1, 16, 4, 4, dtype=torch.bfloat16), tmp_path / "decoder.jit")
    tokenizer = build_autoencoder("cosmos", str(tmp_path))
    assert (tokenizer.dtype, tokenizer.channels, tokenizer.downscale) == (torch.bfloat16, 16, 8)
    latents = tokenizer.encode(IMAGES).mean
    with torch.no_grad():
        wanted = encoder(IMAGES.bfloat16())[0]
        images = decoder(wanted)
    assert latents.shape == (2, 16, 2, 5) and latents.std() > 0.1
    torch.testing.assert_close(latents, wanted.float(), rtol=0, atol=0)
    torch.testing.assert_close(tokenizer.decode(latents), images.float().clamp(-1, 1), rtol=0, atol=0)


def test_the_package_is_used_where_it_is_installed(tmp_path, monkeypatch):
    write_tokenizer(tmp_path, torch.bfloat16)
    plain = build_autoencoder("cosmos", str(tmp_path))
    calls = []

    class ImageTokenizer:
        """The package's interface: encode gives a tuple without the loss terms."""

        def __init__(self, checkpoint_enc, checkpoint_dec, device, dtype):
            calls.append((device, dtype))
            self.networks = torch.jit.load(checkpoint_enc), torch.jit.load(checkpoint_dec)

        def encode(self, x):
            return self.networks[0](x)[:-1]

        def decode(self, z):
            return self.networks[1](z)

    module = ModuleType("cosmos_tokenizer.image_lib")
    module.ImageTokenizer = ImageTokenizer
    monkeypatch.setitem(sys.modules, "cosmos_tokenizer", ModuleType("cosmos_tokenizer"))
    monkeypatch.setitem(sys.modules, "cosmos_tokenizer.image_lib", module)
    through = build_autoencoder("cosmos", str(tmp_path))
    assert calls == [("cpu", "bfloat16")] and through.identity() == plain.identity()
    latents = through.encode(IMAGES).mean
    assert torch.equal(latents, plain.encode(IMAGES).mean)
    assert torch.equal(through.decode(latents), plain.decode(latents))


def test_hub_names_are_fetched_and_a_failure_is_one_line(tmp_path, monkeypatch):
    write_tokenizer(tmp_path)
    asked = []

    def snapshot_download(repository, allow_patterns):
        asked.append((repository, allow_patterns))
        if repository == "nobody/nothing":
            raise ConnectionError("no network\nand a long explanation")
        return str(tmp_path)

    module = ModuleType("huggingface_hub")
    module.snapshot_download = snapshot_download
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    assert build_autoencoder("cosmos", "nvidia/Cosmos-0.1-Tokenizer-CI8x8").channels == 16
    assert asked == [("nvidia/Cosmos-0.1-Tokenizer-CI8x8", ["encoder.jit", "decoder.jit"])]
    with pytest.raises(AutoencoderError, match="no such folder here, and it cannot be fetched .*: no network$"):
        build_autoencoder("cosmos", "nobody/nothing")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(AutoencoderError, match=r"-m pip install datasets huggingface_hub"):
        build_autoencoder("cosmos", "nobody/nothing")
