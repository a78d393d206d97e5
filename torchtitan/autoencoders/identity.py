"""Pixels as latents: stands in for an autoencoder where one is required but not wanted."""

import torch
from torch import Tensor

from torchtitan.autoencoders.base import Autoencoder, AutoencoderError, Latents, compute_dtype
from torchtitan.files.weight_hash import weights_sha256


class IdentityAutoencoder(Autoencoder):
    """Identity: latents are the image itself: 3 channels, no downscaling; decoding clamps to [-1, 1]."""

    name = "identity"
    channels = 3
    downscale = 1

    def __init__(self, path: str, dtype: torch.dtype | None, device: torch.device) -> None:
        """Raises AutoencoderError: a path is given, or a dtype that would round the pixels."""
        if path:
            raise AutoencoderError(f"identity has no weights to read from {path} (leave the path out)")
        super().__init__(compute_dtype(self.name, dtype), device)
        if self.dtype != torch.float32:
            raise AutoencoderError("identity gives the pixels as they are, in float32 (leave the dtype out)")
        self.weights_sha256 = weights_sha256({})

    def _encode(self, images: Tensor) -> Latents:
        return Latents(images)

    def _decode(self, latents: Tensor) -> Tensor:
        return latents
