"""Resizing of images before an extractor: three definitions whose features are not comparable with one another."""

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import interpolate


def resize_bilinear_tf1(images: Tensor, size: int) -> Tensor:
    """Resize as ResizeBilinear of TensorFlow 1: no antialias, corners not aligned, pixel centres at whole numbers.

    Output pixel i is at i * (length / size) of the input, between its two neighbours; beyond the last pixel the last
    is repeated. The result is that of TensorFlow bit for bit where multiplication and addition are rounded one by
    one: lines first, then columns.

    Returns:
        float32 [B, C, size, size] in [0, 255], not rounded.
    """
    height, width = images.shape[-2:]
    values = images.float()
    if width != size:
        first, second, weight = _neighbours(width, size, images.device)
        left = values.index_select(3, first)  # [B, C, H, size]
        values = values.index_select(3, second).sub_(left).mul_(weight).add_(left)
    if height != size:
        first, second, weight = _neighbours(height, size, images.device)
        top = values.index_select(2, first)  # [B, C, size, size]
        values = values.index_select(2, second).sub_(top).mul_(weight[:, None]).add_(top)
    return values


def resize_bicubic_antialias(images: Tensor, size: int) -> Tensor:
    """Resize to float32 [B, C, size, size] as torch does with antialias, not rounded or clamped to [0, 255]."""
    return interpolate(images.float(), size=(size, size), mode="bicubic", antialias=True, align_corners=False)


def resize_bicubic_pillow(images: Tensor, size: int) -> Tensor:
    """Resize as Pillow does, with antialias, lines then columns, each rounded and clamped to whole numbers.

    It runs on the CPU, image by image, since Pillow itself is the definition.

    Args:
        images: uint8 [B, C, H, W], C 1 or 3.

    Returns:
        uint8 [B, C, size, size] on the images' device.
    """
    if images.shape[-2:] == (size, size):
        return images
    resized = np.empty((len(images), size, size, images.shape[1]), dtype=np.uint8)
    for image, pixels in zip(resized, images.permute(0, 2, 3, 1).cpu().numpy(), strict=True):
        picture = Image.fromarray(pixels if pixels.shape[-1] == 3 else pixels[..., 0])
        result = np.asarray(picture.resize((size, size), Image.Resampling.BICUBIC))
        image[:] = result if result.ndim == 3 else result[..., None]
    return torch.from_numpy(resized).permute(0, 3, 1, 2).to(images.device)


def _neighbours(length: int, size: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Neighbours in the input of each output pixel, and the weight of the second; the place is rounded to float32."""
    scale = float(np.float32(length) / np.float32(size))
    place = torch.arange(size, dtype=torch.float32, device=device) * scale
    first = place.long()
    return first, (first + 1).clamp(max=length - 1), place - first
