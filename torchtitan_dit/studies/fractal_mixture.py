"""Fractal of Gaussians in two dimensions: two trees, one per class, whose branches thin out; density in closed form.

The idea, not the numbers, is of Karras et al., "Guiding a diffusion model with a bad version of itself", arXiv 2406.02507,
section 3: data near thin structures of many sizes, which a small network can only fit with errors.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from torchtitan import philox

LEVELS = 6
DEVIATION = 0.5  # root mean square of a coordinate
# Gaussians along a branch, and their deviation along it as a share of their distance.
_ALONG, _SPREAD = 5, 0.5
_FIRST_LENGTH, _FIRST_WIDTH, _WIDTH_RATIO, _CHILD_WEIGHT = 1.0, 0.06, 0.7, 0.49
# Turn in degrees, and share of the length, of the two branches at the end of one.
_CHILDREN = ((32.0, 0.74), (-41.0, 0.66))
_ROOTS = ((-0.35, -1.1, 78.0), (0.35, 1.1, 258.0))  # x, y, direction in degrees of each class's trunk


@dataclass(frozen=True)
class FractalMixture:
    """Mixture of Gaussians of one class; float64.

    Attributes:
        means: [K, 2].
        covariances: [K, 2, 2].
        weights: [K], sum 1.
        branches: number of the branch that each is a part of, int64 [K].
    """

    means: Tensor
    covariances: Tensor
    weights: Tensor
    branches: Tensor

    @property
    def branch_weights(self) -> Tensor:
        """Share of the data on each branch, [number of branches]."""
        return torch.zeros(int(self.branches.max()) + 1, dtype=torch.float64).index_add(0, self.branches, self.weights)

    def draw(self, seed: int, numbers: Tensor) -> Tensor:
        """Draw points [N, 2], float64, as a function of their numbers [N]."""
        chosen = torch.searchsorted(self.weights.cumsum(0), philox.uniform(seed, "data_order", numbers))
        chosen = chosen.clamp(max=len(self.weights) - 1)
        noise = philox.normal(seed, "synthetic_data", numbers, (2,)).double()
        factors = torch.linalg.cholesky(self.covariances)[chosen]  # [N, 2, 2]
        return self.means[chosen] + factors[:, :, 0] * noise[:, :1] + factors[:, :, 1] * noise[:, 1:]

    def log_density(self, points: Tensor, sigma: float = 0.0) -> Tensor:
        """Log density [N] at points [N, 2] of the data with Gaussian noise of deviation sigma added."""
        return self._log_joint(points, sigma).logsumexp(1)

    def branch_of(self, points: Tensor) -> Tensor:
        """Branch [N] that each point most likely is of."""
        return self.branches[self._log_joint(points, 0.0).argmax(1)]

    def _log_joint(self, points: Tensor, sigma: float) -> Tensor:
        """Log of weight x density of each Gaussian, [N, K]: quadratic in the coordinates."""
        precisions = self._precisions(sigma)
        linear = (precisions @ self.means[:, :, None])[:, :, 0]
        constant = self.weights.log() + 0.5 * torch.logdet(precisions / (2 * math.pi)) - 0.5 * (linear * self.means).sum(1)
        x, y = points.double().T
        features = torch.stack((x * x, x * y, y * y, x, y, torch.ones_like(x)), dim=1)
        coefficients = torch.stack((
            -0.5 * precisions[:, 0, 0], -precisions[:, 0, 1], -0.5 * precisions[:, 1, 1], linear[:, 0], linear[:, 1], constant,
        ))  # fmt: skip
        return features @ coefficients

    def _precisions(self, sigma: float) -> Tensor:
        return torch.linalg.inv(self.covariances + sigma**2 * torch.eye(2, dtype=torch.float64))


def fractal_mixtures(levels: int = LEVELS) -> tuple[FractalMixture, ...]:
    """Mixtures of both classes, centred and scaled together to the deviation 0.5 of a coordinate.

    Args:
        levels: of branches; a class has 2^levels - 1.
    """
    classes = [_tree(root, levels) for root in _ROOTS]
    means = torch.stack([(tree.weights[:, None] * tree.means).sum(0) for tree in classes]).mean(0)
    moved = [tree.means - means for tree in classes]
    variance = torch.stack([
        (tree.weights * (mean.square().sum(1) + tree.covariances.diagonal(dim1=1, dim2=2).sum(1))).sum() / 2
        for tree, mean in zip(classes, moved, strict=True)
    ]).mean()
    scale = DEVIATION / variance.sqrt()
    return tuple(
        FractalMixture(mean * scale, tree.covariances * scale**2, tree.weights, tree.branches)
        for tree, mean in zip(classes, moved, strict=True)
    )


def _tree(root: tuple[float, float, float], levels: int) -> FractalMixture:
    x, y, degrees = root
    ends = [(x, y, math.radians(degrees), _FIRST_LENGTH, 1.0)]
    means: list[Tensor] = []
    covariances: list[Tensor] = []
    weights: list[float] = []
    branches: list[int] = []
    width = _FIRST_WIDTH
    for _ in range(levels):
        next_ends = []
        for x, y, angle, length, weight in ends:
            along = torch.tensor([math.cos(angle), math.sin(angle)], dtype=torch.float64)
            across = torch.stack((-along[1], along[0]))
            spread = _SPREAD * length / _ALONG
            covariance = spread**2 * torch.outer(along, along) + width**2 * torch.outer(across, across)
            number = len(weights) // _ALONG
            for place in range(_ALONG):
                means.append(torch.tensor([x, y], dtype=torch.float64) + (place + 0.5) / _ALONG * length * along)
                covariances.append(covariance)
                weights.append(weight / _ALONG)
                branches.append(number)
            x, y = x + length * math.cos(angle), y + length * math.sin(angle)
            for turn, ratio in _CHILDREN:
                next_ends.append((x, y, angle + math.radians(turn), length * ratio, weight * _CHILD_WEIGHT))
        ends, width = next_ends, width * _WIDTH_RATIO
    all_weights = torch.tensor(weights, dtype=torch.float64)
    return FractalMixture(
        torch.stack(means), torch.stack(covariances), all_weights / all_weights.sum(), torch.tensor(branches)
    )
