"""Base of autoencoders: images to latents and back, and the identity of the weights."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

import torch
from torch import Tensor, nn

COMPUTE_DTYPES = (torch.float32, torch.bfloat16)


class AutoencoderError(Exception):
    """Autoencoder, or data for one, that cannot be used; one line: the cause and the remedy."""


class Normalization(TypedDict):
    """Normalisation as plain numbers, one per channel or one per element [C, h, w]: normalized = (raw - shift) * scale."""

    shift: list[float]
    scale: list[float]


@dataclass(frozen=True)
class Latents:
    """Latents of an encoder, raw: neither shifted nor scaled.

    Attributes:
        mean: [B, C, h, w] float32.
        std: of the posterior, [B, C, h, w] float32; None where the encoder is deterministic.
    """

    mean: Tensor
    std: Tensor | None = None


class Autoencoder(nn.Module):
    """Base of every autoencoder: in eval mode, without gradients, on one device.

    A subclass implements `_encode`, `_decode` and `weights_sha256`; both methods take and give the compute dtype.

    Attributes:
        downscale: pixels per latent position along each side.
        normalization: of the latents, from the model's own configuration, or None where it has none.
        weights_sha256: hash of the weights, the same on every machine and in any compute dtype; "" where none were read.
        device: where it computes; images and latents are brought there.
    """

    name: str
    channels: int
    downscale: int
    normalization: Normalization | None = None
    weights_sha256: str

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.dtype = dtype
        self.device = device

    @torch.no_grad()
    def encode(self, images: Tensor) -> Latents:
        """Encode images.

        Args:
            images: [B, 3, H, W] float32 in [-1, 1], H and W multiples of `downscale`.

        Returns:
            raw latents [B, C, H / downscale, W / downscale] on the autoencoder's device.

        Raises:
            AutoencoderError: the images are not of that shape.
        """
        self.check_images(images)
        latents = self._encode(images.to(self.device, self.dtype))
        return Latents(latents.mean.float(), None if latents.std is None else latents.std.float())

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Decode latents.

        Args:
            latents: raw, [B, C, h, w] float32.

        Returns:
            images [B, 3, h * downscale, w * downscale] float32, clamped to [-1, 1], on the autoencoder's device.

        Raises:
            AutoencoderError: the latents are not of that shape.
        """
        self.check_latents(latents)
        return self._decode(latents.to(self.device, self.dtype)).float().clamp(-1, 1)

    def identity(self) -> dict:
        """Identity of the autoencoder, for JSON; equal on every machine and in any compute dtype."""
        return {
            "name": self.name,
            "sha256": self.weights_sha256,
            "channels": self.channels,
            "downscale": self.downscale,
        }

    def move(self, device: torch.device) -> None:
        """Move the networks to a device, from meta without values, and compute there from now on."""
        move = self.to_empty if self.device.type == "meta" else self.to
        for module in self.modules():
            if isinstance(module, Autoencoder):
                module.device = device
        move(device=device)

    def train(self, mode: bool = True) -> "Autoencoder":
        # Stays in eval mode even where it is part of a module that is trained.
        return super().train(False)

    def check_images(self, images: Tensor) -> None:
        """Check that `images` are [B, 3, H, W], sides multiples of `downscale`. Raises AutoencoderError."""
        shape = list(images.shape)
        if images.ndim != 4 or shape[1] != 3:
            raise AutoencoderError(f"{self.name} encodes images [B, 3, H, W], not {shape}")
        if shape[2] % self.downscale or shape[3] % self.downscale or 0 in shape:
            raise AutoencoderError(
                f"{self.name} encodes images whose sides are multiples of {self.downscale} pixels, not "
                f"{shape[2]} x {shape[3]}"
            )

    def check_latents(self, latents: Tensor) -> None:
        """Check that `latents` are [B, C, h, w] with this autoencoder's number of channels. Raises AutoencoderError."""
        shape = list(latents.shape)
        if latents.ndim != 4 or shape[1] != self.channels or 0 in shape:
            raise AutoencoderError(f"{self.name} decodes latents [B, {self.channels}, h, w], not {shape}")

    def freeze(self) -> None:
        """Put the networks in eval mode, without gradients, in the compute dtype and on the device."""
        self.eval().requires_grad_(False).to(self.device, self.dtype)

    def _encode(self, images: Tensor) -> Latents:
        raise NotImplementedError

    def _decode(self, latents: Tensor) -> Tensor:
        raise NotImplementedError


def compute_dtype(name: str, dtype: torch.dtype | None) -> torch.dtype:
    """Compute dtype: the given one, float32 by default. Raises AutoencoderError: it is not one to compute in."""
    if dtype is None:
        return torch.float32
    if dtype not in COMPUTE_DTYPES:  # float16 overflows in several published decoders
        raise AutoencoderError(f"{name} computes in float32 or bfloat16, not {dtype_name(dtype)}")
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def normalize(latents: Tensor, normalization: Normalization) -> Tensor:
    """Normalise raw latents [B, C, h, w]: (raw - shift) * scale."""
    shift, scale = _shift_and_scale(latents, normalization)
    return (latents - shift) * scale


def denormalize(latents: Tensor, normalization: Normalization) -> Tensor:
    """Denormalise: the inverse of `normalize`."""
    shift, scale = _shift_and_scale(latents, normalization)
    return latents / scale + shift


def of_latents(values: Sequence[float], shape: Sequence[int]) -> Tensor:
    """Statistics of latents (C, h, w) as float64 that broadcasts over them: [C, 1, 1], or [C, h, w] of each element."""
    return torch.tensor(values, dtype=torch.float64).reshape((-1, 1, 1) if len(values) == shape[0] else tuple(shape))


def _shift_and_scale(latents: Tensor, normalization: Normalization) -> tuple[Tensor, Tensor]:
    shift, scale = (of_latents(normalization[key], latents.shape[1:]).to(latents) for key in ("shift", "scale"))
    return shift, scale
