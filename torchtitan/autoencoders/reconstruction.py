"""Reconstruction quality of an autoencoder: in figures, and side by side."""

from collections.abc import Sequence

import torch
from PIL import Image
from torch import Tensor

from torchtitan.pictures.grids import image_grid

DIFFERENCE_GAIN = 4


def psnr(images: Tensor, others: Tensor) -> Tensor:
    """Peak signal-to-noise ratio of each pair in dB: 10 log10(2^2 / mean squared error); infinite for equals.

    Args:
        images, others: [B, C, H, W] with values in [-1, 1].

    Returns:
        [B] float32.
    """
    error = (images.float() - others.float()).square().mean(dim=(1, 2, 3))
    return 10 * torch.log10(4 / error)


def side_by_side(images: Tensor, reconstructions: Tensor, labels: Sequence[str], title: str = "") -> Image.Image:
    """Draw a row per image [3, H, W] in [-1, 1]: original, reconstruction, four times the difference around grey."""
    difference = (DIFFERENCE_GAIN * (reconstructions - images)).clamp(-1, 1)
    cells = torch.stack((images, reconstructions, difference), dim=1).flatten(0, 1)  # [3 N, 3, H, W]
    return image_grid(cells, len(images), 3, labels, title)
