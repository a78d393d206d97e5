"""Synthetic images made from their index: for benchmarks without a disk, and for data of known optimal loss."""

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from torchtitan import philox
from torchtitan.conditions import POOLED, TEXT, ConditionKind, Embeddings, class_kind
from torchtitan.data.base import Batch, DataConfig, Dataset, DatasetError, DatasetInfo, Split
from torchtitan.settings import setting

NUM_VALIDATION = 10_000
_SEED = 0  # of the images and texts
WORDS_AT_A_TIME = 2**20  # bounds the memory of the generator's 64-bit intermediates


@dataclass(kw_only=True)
class SyntheticConfig(DataConfig):
    """`[data]` with name = "synthetic"."""

    name: Literal["synthetic"] = setting("synthetic", "dataset")
    kind: Literal["constant", "noise", "gaussian"] = setting(
        "gaussian",
        "constant: one value per class; noise: white, unit variance; gaussian: stationary, power-law spectrum",
    )
    shape: list[int] = setting([4, 32, 32], "channels, height and width")
    num_classes: int = setting(10, "image i has label i modulo this; 0: no labels", ge=0, le=100_000_000)
    num_images: int = setting(1_000_000, "training images", ge=1, le=10_000_000_000)
    spectrum_alpha: float = setting(
        2.0, "variance at radial frequency f falls as f^-alpha", ge=0, le=100, applies={"kind": ("gaussian",)}
    )
    pixel_variance: float = setting(1.0, "variance of each pixel", gt=0, applies={"kind": ("gaussian",)})
    text_length: int = setting(
        0, "tokens of random text embeddings, which condition the network instead of the class; 0: the class", ge=0, le=4096
    )
    text_dim: int = setting(4096, "width of each token's embedding", ge=1, le=65536, applies={"text_length": ">0"})
    pooled_dim: int = setting(768, "width of the embedding of the whole text", ge=1, le=65536, applies={"text_length": ">0"})


class Synthetic(Dataset):
    """Synthetic images: numbers 0 .. num_images - 1 are for training, the next NUM_VALIDATION for validation."""

    Config = SyntheticConfig

    @staticmethod
    def info(config: SyntheticConfig) -> DatasetInfo:
        if len(config.shape) != 3 or min(config.shape) < 1:
            raise DatasetError(f"data.shape: {config.shape} is not three positive numbers: channels, height, width")
        channels, height, width = config.shape
        return DatasetInfo((channels, height, width), _condition_kind(config))

    def __init__(self, config: SyntheticConfig, split: Split) -> None:
        self._shape = self.info(config).image_shape
        self._config = config
        self._first, self._length = (0, config.num_images) if split == "train" else (config.num_images, NUM_VALIDATION)
        if config.kind == "gaussian":
            width = self._shape[2]
            self._filter = mode_variances(config)[..., : width // 2 + 1].sqrt().to(torch.float32)  # [C, H, W // 2 + 1]

    def __len__(self) -> int:
        return self._length

    def fetch(self, indices: np.ndarray) -> Batch:
        numbers = torch.from_numpy(indices) + self._first
        classes = max(self._config.num_classes, 1)
        labels = numbers % classes
        if self._config.kind == "constant":
            values = (2 * labels + 1).to(torch.float32) / classes - 1  # centres of equal intervals of [-1, 1]
            images = values[:, None, None, None].expand(-1, *self._shape).contiguous()
        else:
            images_at_a_time = max(1, WORDS_AT_A_TIME // math.prod(self._shape))
            parts = [*map(self._draw, numbers.split(images_at_a_time))]
            images = parts[0] if len(parts) == 1 else torch.cat(parts)
        if self._config.text_length:
            return {"images": images} | self._draw_texts(numbers)
        return {"images": images} | ({"class": labels} if self._config.num_classes else {})

    def _draw_texts(self, numbers: Tensor) -> Batch:
        """Standard normal embeddings: TEXT [B, L, D] and POOLED [B, P]."""
        length, dim, pooled = self._config.text_length, self._config.text_dim, self._config.pooled_dim
        count = length * dim + pooled
        texts_at_a_time = max(1, WORDS_AT_A_TIME // count)
        drawn = torch.cat([
            philox.normal(_SEED, "synthetic_text", part, (count,)) for part in numbers.split(texts_at_a_time)
        ])  # [B, L D + P]
        text, whole = drawn.split((length * dim, pooled), dim=1)
        return {TEXT: text.reshape(-1, length, dim), POOLED: whole.contiguous()}

    def _draw(self, numbers: Tensor) -> Tensor:
        white = philox.normal(_SEED, "synthetic_data", numbers, self._shape)  # [B, C, H, W]
        if self._config.kind == "noise":
            return white
        return torch.fft.irfft2(torch.fft.rfft2(white) * self._filter, s=self._shape[1:])


def _condition_kind(config: SyntheticConfig) -> ConditionKind:
    return text_kind(config) if config.text_length else class_kind(config.num_classes)


def text_kind(config: Any, dtype: torch.dtype = torch.float32) -> Embeddings:
    """Kind of a section with text_length, text_dim and pooled_dim; zeros stand for no condition."""
    zero = torch.zeros((), dtype=dtype)
    return Embeddings({TEXT: zero.expand(config.text_length, config.text_dim), POOLED: zero.expand(config.pooled_dim)})


def mode_variances(config: SyntheticConfig) -> Tensor:
    """Variances of the orthonormal Fourier modes: eigenvalues of the data's covariance.

    A mode of integer frequency (fy, fx) has variance A f^-alpha with f = sqrt(fx^2 + fy^2), the constant mode
    counting as f = 1. An image is white noise filtered by their square roots, so channels are independent, the
    covariance is circulant with exactly these eigenvalues, and their mean is the variance of a pixel: this sets A.

    Args:
        config: kind "gaussian", or "noise", where all are 1.

    Returns:
        float64 [C, H, W], indexed as torch.fft.fft2 orders frequencies.
    """
    channels, height, width = config.shape
    if config.kind == "noise":
        return torch.ones(channels, height, width, dtype=torch.float64)
    fy = torch.fft.fftfreq(height, d=1 / height, dtype=torch.float64)
    fx = torch.fft.fftfreq(width, d=1 / width, dtype=torch.float64)
    squared_radius = (fy[:, None] ** 2 + fx[None, :] ** 2).clamp(min=1)  # [H, W]
    spectrum = squared_radius ** (-config.spectrum_alpha / 2)
    return (config.pixel_variance * spectrum / spectrum.mean()).expand(channels, -1, -1).clone()
