"""A teacher's features of images as latents, which a store keeps: [C, h, w], channels of the tokens on a grid."""

from typing import Any

import torch
from torch import Tensor

from torchtitan.alignment.config import AlignmentConfig
from torchtitan.alignment.plan import open_encoder
from torchtitan.autoencoders.base import Autoencoder, AutoencoderError, Latents
from torchtitan.errors import ConfigError, EvaluationError
from torchtitan.files.weight_hash import weights_sha256


class FeatureEncoder(Autoencoder):
    """Encoder of images to a teacher's features; it decodes nothing."""

    name = "features"
    downscale = 1  # images of any size

    def __init__(self, teacher: str, path: str, grid: tuple[int, int], dtype: torch.dtype | None, device: torch.device) -> None:
        """
        Args:
            teacher: a name in ENCODERS.
            grid: of the network's tokens.
            dtype: of compute, by autocast as in training; None: float32.

        Raises:
            AutoencoderError: its weights cannot be read.
        """
        super().__init__(torch.float32, device)
        self._teacher, self._grid, self._compute = teacher, grid, dtype or torch.float32
        try:
            self._encoder = open_encoder(AlignmentConfig(teacher=teacher, path=path), device)
        except ConfigError as error:
            text = "; ".join(error.problems).removeprefix("alignment.").replace("--alignment.path", "--path")
            raise AutoencoderError(f"--features {teacher}: {text}") from error
        self.weights_sha256 = weights_sha256(self._encoder.state_dict())

    def identity(self) -> dict[str, Any]:
        return {"name": self.name, "teacher": self._teacher, "sha256": self.weights_sha256, "grid": list(self._grid)}

    def _encode(self, images: Tensor) -> Latents:
        try:
            with torch.autocast(self.device.type, self._compute, enabled=self._compute != torch.float32):
                features = self._encoder(images, self._grid)  # [B, T, C]
        except EvaluationError as error:
            raise AutoencoderError(f"--features: {self._teacher} {error}") from error
        return Latents(features.transpose(1, 2).unflatten(2, self._grid))
