"""Paths from data to noise: x_t = a(t) x0 + b(t) noise, with t = sigma / (1 + sigma) and sigma = b / a.

t = 0 is clean data, t = 1 is noise, and ln sigma = logit t on every path.
"""

from typing import Protocol

import torch
from torch import Tensor


class Path(Protocol):
    """The two coefficients of a path and their derivatives, as functions of t in [0, 1]."""

    def coefficients(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """a(t) and b(t), each of t's shape."""

    def derivatives(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """da/dt and db/dt, each of t's shape."""


class RectifiedFlow:
    """x_t = (1 - t) x0 + t noise. Source: Liu, Gong and Liu, "Flow straight and fast", arXiv 2209.03003, eq. 1."""

    def coefficients(self, t: Tensor) -> tuple[Tensor, Tensor]:
        return 1.0 - t, t

    def derivatives(self, t: Tensor) -> tuple[Tensor, Tensor]:
        return -torch.ones_like(t), torch.ones_like(t)


PATHS: dict[str, type[Path]] = {
    "rectified_flow": RectifiedFlow,
}


def per_image(values: Tensor, images: Tensor) -> Tensor:
    """View one value per image [B] so that it broadcasts over images [B, ...]."""
    return values.reshape(-1, *([1] * (images.ndim - 1)))
