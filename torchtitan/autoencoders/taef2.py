"""TAEF2, a tiny deterministic autoencoder distilled from that of FLUX.2: 8x down, 32 channels, 2.7 M weights.

Source: the public repository madebyollin/taesd (MIT licence), whose weights these networks read.
"""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import relu

from torchtitan.autoencoders.base import Autoencoder, AutoencoderError, Latents, compute_dtype
from torchtitan.files.regular import user_path
from torchtitan.files.weight_files import WeightsError, mismatches, read_state_dict
from torchtitan.files.weight_hash import weights_sha256

WIDTH = 64
POOL_WIDTH = 256
LATENT_CHANNELS = 32
LATENT_LIMIT = 3.0
SUFFIXES = (".safetensors", ".pth")


class Taef2(Autoencoder):
    """TAEF2's encoder and decoder; pixels in [0, 1] inside. The model's source states no normalization."""

    name = "taef2"
    channels = LATENT_CHANNELS
    downscale = 8

    def __init__(self, path: str, dtype: torch.dtype | None, device: torch.device) -> None:
        """
        Args:
            path: folder with taef2_encoder and taef2_decoder, as .safetensors or as the .pth files of the source.

        Raises:
            AutoencoderError: a file is missing or damaged, or holds other weights.
        """
        super().__init__(compute_dtype(self.name, dtype), device)
        self.encoder, self.decoder = build_encoder(), build_decoder()
        for part, network in (("encoder", self.encoder), ("decoder", self.decoder)):
            _fill(network, _weights_file(path, part))
        self.weights_sha256 = weights_sha256(self.state_dict())
        self.freeze()

    def _encode(self, images: Tensor) -> Latents:
        return Latents(self.encoder((images + 1) / 2))

    def _decode(self, latents: Tensor) -> Tensor:
        return self.decoder(latents) * 2 - 1


def build_encoder() -> nn.Sequential:
    """Encoder: pixels [B, 3, H, W] in [0, 1] -> latents [B, 32, H / 8, W / 8]; parameter names as in the files."""
    return nn.Sequential(
        _convolution(3, WIDTH),
        ResidualBlock(),
        _halve(), ResidualBlock(), ResidualBlock(), ResidualBlock(),
        _halve(), ResidualBlock(), ResidualBlock(), ResidualBlock(),
        _halve(), ResidualBlock(pool=True), ResidualBlock(pool=True), ResidualBlock(pool=True),
        _convolution(WIDTH, LATENT_CHANNELS),
    )  # fmt: skip


def build_decoder() -> nn.Sequential:
    """Decoder: latents [B, 32, h, w] -> pixels [B, 3, 8 h, 8 w], about [0, 1]; parameter names as in the files."""
    return nn.Sequential(
        SoftLimit(),
        _convolution(LATENT_CHANNELS, WIDTH), nn.ReLU(),
        ResidualBlock(pool=True), ResidualBlock(pool=True), ResidualBlock(pool=True),
        nn.Upsample(scale_factor=2), _convolution(WIDTH, WIDTH, bias=False),
        ResidualBlock(), ResidualBlock(), ResidualBlock(),
        nn.Upsample(scale_factor=2), _convolution(WIDTH, WIDTH, bias=False),
        ResidualBlock(), ResidualBlock(), ResidualBlock(),
        nn.Upsample(scale_factor=2), _convolution(WIDTH, WIDTH, bias=False),
        ResidualBlock(),
        _convolution(WIDTH, 3),
    )  # fmt: skip


class ResidualBlock(nn.Module):
    """Residual block relu(f(x) + x), f three convolutions; with `pool`, x first gains a wide, normalised output.

    The group norm takes its statistics over all positions, so that the blocks with `pool` see the whole image.
    """

    def __init__(self, pool: bool = False) -> None:
        super().__init__()
        self.conv = nn.Sequential(
            _convolution(WIDTH, WIDTH), nn.ReLU(), _convolution(WIDTH, WIDTH), nn.ReLU(), _convolution(WIDTH, WIDTH)
        )
        self.pool = nn.Sequential(
            nn.Conv2d(WIDTH, POOL_WIDTH, 1, bias=False),
            nn.GroupNorm(4, POOL_WIDTH),
            nn.ReLU(),
            nn.Conv2d(POOL_WIDTH, WIDTH, 1, bias=False),
        ) if pool else None  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        if self.pool is not None:
            x = x + self.pool(x)
        return relu(self.conv(x) + x)


class SoftLimit(nn.Module):
    """Soft limit of latents to (-3, 3); small ones stay as they are."""

    def forward(self, x: Tensor) -> Tensor:
        return LATENT_LIMIT * torch.tanh(x / LATENT_LIMIT)


def _convolution(channels_in: int, channels_out: int, bias: bool = True) -> nn.Conv2d:
    return nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=bias)


def _halve() -> nn.Conv2d:
    return nn.Conv2d(WIDTH, WIDTH, 3, stride=2, padding=1, bias=False)


def _weights_file(path: str, part: str) -> Path:
    names = [f"taef2_{part}{suffix}" for suffix in SUFFIXES]
    folder = user_path(path)
    found = next((folder / name for name in names if (folder / name).is_file()), None)
    if not path or found is None:
        raise AutoencoderError(
            f"taef2: {path or 'no path'}: a folder with {' or '.join(names)} is needed "
            "(weights: github.com/madebyollin/taesd)"
        )
    return found


def _fill(network: nn.Module, file: Path) -> None:
    try:
        tensors, _ = read_state_dict(file)
    except WeightsError as error:
        raise AutoencoderError(f"taef2: {error}") from error
    wanted = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    problems = mismatches(wanted, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
    if problems:
        raise AutoencoderError(f"taef2: {file}: {'; '.join(problems)}")
    network.load_state_dict(tensors)
