"""Inner products of several true gradients, unbiased, from mean gradients of the same blocks of samples."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

_CHUNK = 1 << 16  # elements of a gradient at a time


@dataclass(frozen=True)
class BlockProducts:
    """Inner products of blocks' mean gradients, float64 [K, n, K, n]: block i of all K gradients is of the same samples."""

    gram: Tensor

    @property
    def values(self) -> Tensor:
        """Products G_i'G_j of the true gradients, float64 [K, K], symmetric; a diagonal element may be negative.

        All pairs of different blocks count: noise that is independent adds nothing in expectation.
        """
        count = self.gram.shape[1]
        return (self.gram.sum((1, 3)) / count - self._of_same_blocks()) / (count - 1)

    @property
    def noise(self) -> Tensor:
        """Covariances E (g_i - G_i)'(g_j - G_j) of the mean gradients of one block, [K, K].

        Times the samples of a block, they are those of single samples: tr Sigma on the diagonal.
        """
        return self._of_same_blocks() - self.values

    def error_of(self, statistic: Callable[["BlockProducts"], Tensor]) -> Tensor:
        """Standard error of a function of the products by the jackknife: block i of every gradient is left out together."""
        count = self.gram.shape[1]
        kept = [[other for other in range(count) if other != block] for block in range(count)]
        left = torch.stack([statistic(BlockProducts(self.gram[:, some][:, :, :, some])) for some in kept])
        return ((count - 1) * left.var(0, correction=0)).sqrt()

    def _of_same_blocks(self) -> Tensor:
        return torch.einsum("iaja->ij", self.gram) / self.gram.shape[1]


def block_products(blocks: Tensor) -> BlockProducts:
    """Products of blocks of mean gradients.

    Args:
        blocks: mean gradients of equally many samples, [K, n, P], n at least 3.

    Raises:
        ValueError: fewer than three blocks.
    """
    gradients, count, size = blocks.shape
    if count < 3:
        raise ValueError(f"{count} blocks: a standard error needs three at least")
    gram = torch.zeros(gradients * count, gradients * count, dtype=torch.float64)
    for first in range(0, size, _CHUNK):
        part = blocks[:, :, first : first + _CHUNK].flatten(0, 1).double()
        gram += part @ part.T
    return BlockProducts(gram.view(gradients, count, gradients, count))
