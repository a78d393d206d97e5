"""Synthetic gradients of known noise scale, for testing estimators."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from research.published_estimator import SUB_BATCH, effective_size, published_estimate


@dataclass(frozen=True)
class SyntheticGradients:
    """Synthetic gradients of single samples, N(G, (S / d) I) in d dimensions, so that the noise scale is S / |G|^2.

    The defaults are fitted to the published tables' checkpoint at 40,000 steps, whole range of timesteps: the noise
    scale is 10.5. The published formula, with sub-batches of 32 and two pairs of batches for |G|^2, has medians near
    147, 12.4, 359 and 24.9 there for (b, B) = (50, 500), (50, 5000), (100, 1000) and (100, 10000).

    The gradients of single samples are never drawn. The mean of n of them is N(G, S / (d n) I), and an equally weighted
    mean of sub-batches' means is the same with n its effective size, so one vector stands for a batch of any size.
    Everything is drawn from the `generator` given, on the CPU, in float64.
    """

    signal: float = 0.0135  # |G|^2
    noise: float = 0.14175  # S
    dimension: int = 200

    @property
    def noise_scale(self) -> float:
        """Noise scale S / |G|^2."""
        return self.noise / self.signal

    def means(self, sizes: Tensor, generator: torch.Generator) -> Tensor:
        """Independent mean gradients [m, d], each of (or worth) `sizes` [m] samples."""
        means = torch.randn(len(sizes), self.dimension, generator=generator, dtype=torch.float64)
        means *= torch.sqrt(self.noise / (self.dimension * sizes.to(torch.float64)))[:, None]
        means[:, 0] += math.sqrt(self.signal)
        return means

    def published(self, b: int, big_b: int, reps: int, generator: torch.Generator) -> tuple[float, float]:
        """Published estimate (|G|^2, S) of these gradients. Raises EstimateFailed as it does."""
        sizes = torch.tensor([effective_size(size, SUB_BATCH) for size in (b, big_b)]).repeat(reps + 1)
        squares = self.means(sizes, generator).square().sum(1).view(-1, 2).tolist()
        pairs = [(small, large) for small, large in squares]
        return published_estimate(b, big_b, pairs[0], pairs[1:])
