"""Mean gradient and noise scale of one timestep bin along a training: how fast the gradient turns, and what a window sees."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from torchtitan.evaluation.offline_gradients import GradientError, GroupNorms, NoiseScale, noise_scale, square_norm
from torchtitan_dit.studies.block_products import BlockProducts, block_products

BLOCKS, GROUPS = 8, 4  # of the samples at a checkpoint, and of each block


class PointGradient(Protocol):
    """Gradient of a timestep bin at one point of a training. Samples are known by numbers."""

    def gradient(self, numbers: Tensor) -> Tensor:
        """Mean gradient of samples [N], float32 [P]."""


@dataclass(frozen=True)
class Trajectory:
    """Estimates at T points of a training.

    Attributes:
        scales: noise scale at each point.
        window: noise scale of all points, mean tr Sigma over mean |G|^2.
        products: inner products of the points' mean gradients, [T, T].
    """

    scales: list[NoiseScale]
    window: NoiseScale
    products: BlockProducts


def measure_trajectory(
    points: Sequence[Callable[[], PointGradient]], samples: int, advance: Callable[[int], None] = lambda amount: None
) -> Trajectory:
    """Measure a bin at points of a training, with independent samples at each.

    Args:
        points: open the gradient at each of T points, in order; of P weights.
        samples: at each point, a multiple of BLOCKS x GROUPS; numbers n samples, ... (n + 1) samples - 1 at point n.
        advance: called with the number of samples after some are done.

    Raises:
        GradientError: a gradient is not finite, or all are zero.
        DatasetError: an image could not be read.
    """
    size = samples // (BLOCKS * GROUPS)
    blocks_of_points, norms_of_points = [], []
    for number, opened in enumerate(points):
        point = opened()
        numbers = torch.arange(number * samples, (number + 1) * samples).view(BLOCKS, GROUPS, size)
        blocks, norms = [], []
        for block in numbers:
            groups = []
            for group in block:
                groups.append(point.gradient(group))
                advance(size)
            squares = torch.tensor([square_norm([group]) for group in groups], dtype=torch.float64)
            blocks.append(torch.stack(groups).mean(0))
            norms.append(GroupNorms(torch.full((GROUPS,), size), squares, square_norm([blocks[-1]])))
        blocks_of_points.append(torch.stack(blocks))
        norms_of_points.append(norms)
    if not any(norms.mean_square_norm for of_point in norms_of_points for norms in of_point):
        raise GradientError("every gradient is zero")
    every = [norms for of_point in norms_of_points for norms in of_point]
    return Trajectory(
        [noise_scale(of_point) for of_point in norms_of_points], noise_scale(every),
        block_products(torch.stack(blocks_of_points)),
    )  # fmt: skip


def lag_cosines(products: Tensor, steps: Sequence[int], lags: Sequence[int]) -> Tensor:
    """Cosines of the mean gradients at points k steps apart, pooled over all such pairs of points.

    Args:
        products: unbiased G_s'G_t, float64 [T, T].
        steps: of the points, [T].
        lags: numbers of steps k.

    Returns:
        float64 [lags]: the sum of G_t'G_{t+k} by that of |G_t| |G_{t+k}|; NaN without a pair, or where a |G|^2 is not positive.
    """
    norms = products.diagonal().clamp_min(0.0).sqrt()
    apart = torch.tensor(steps)[None, :] - torch.tensor(steps)[:, None]
    found = []
    for lag in lags:
        chosen = apart == lag
        size = torch.outer(norms, norms)[chosen]
        known = bool(len(size)) and bool((size > 0).all())
        found.append(products[chosen].sum() / size.sum() if known else torch.tensor(torch.nan, dtype=torch.float64))
    return torch.stack(found)
