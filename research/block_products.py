"""Inner products of several true gradients, unbiased, from mean gradients of blocks of samples."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

_CHUNK = 1 << 16  # elements of a gradient at a time


@dataclass(frozen=True)
class BlockProducts:
    """Inner products of blocks' mean gradients; K gradients of n blocks each.

    Attributes:
        gram: float64 [K, n, K, n].
        paired: whether block i of all gradients is of the same samples; otherwise no two blocks have a common one.
    """

    gram: Tensor
    paired: bool = False

    @property
    def values(self) -> Tensor:
        """Products G_i'P G_j of the true gradients, float64 [K, K], symmetric; a diagonal element may be negative.

        Of two gradients all pairs of blocks without a common sample count: noise that is independent adds nothing in
        expectation.
        """
        apart = self._of_different_blocks()
        if self.paired:
            return apart
        return torch.where(torch.eye(len(apart), dtype=torch.bool), apart, self.gram.mean((1, 3)))

    @property
    def noise(self) -> Tensor:
        """Covariances E (g_i - G_i)'P (g_j - G_j) of the mean gradients of one block, [K, K]; of paired blocks off the diagonal.

        Times the samples of a block, they are those of single samples: tr Sigma on the diagonal.
        """
        return self._of_same_blocks() - self._of_different_blocks()

    @property
    def errors(self) -> Tensor:
        """Standard errors of the values by the jackknife over blocks, [K, K]."""
        return self.error_of(lambda kept: kept.values)

    def error_of(self, statistic: Callable[["BlockProducts"], Tensor]) -> Tensor:
        """Standard error of a function of the products by the jackknife: block i of every gradient is left out together."""
        count = self.gram.shape[1]
        kept = [[other for other in range(count) if other != block] for block in range(count)]
        left = torch.stack([statistic(BlockProducts(self.gram[:, some][:, :, :, some], self.paired)) for some in kept])
        return ((count - 1) * left.var(0, correction=0)).sqrt()

    def _of_same_blocks(self) -> Tensor:
        return torch.einsum("iaja->ij", self.gram) / self.gram.shape[1]

    def _of_different_blocks(self) -> Tensor:
        count = self.gram.shape[1]
        return (self.gram.sum((1, 3)) / count - self._of_same_blocks()) / (count - 1)


def block_products(blocks: Tensor, scale: Tensor | None = None, paired: bool = False) -> BlockProducts:
    """Products of blocks of mean gradients.

    Args:
        blocks: mean gradients of equally many samples, [K, n, P], n at least 3.
        scale: diagonal of P, positive [P]; None: the identity.
        paired: whether block i of all gradients is of the same samples.

    Raises:
        ValueError: fewer than three blocks.
    """
    gradients, count, size = blocks.shape
    if count < 3:
        raise ValueError(f"{count} blocks: a standard error needs three at least")
    gram = torch.zeros(gradients * count, gradients * count, dtype=torch.float64)
    for first in range(0, size, _CHUNK):
        part = blocks[:, :, first : first + _CHUNK].flatten(0, 1).double()
        gram += part @ (part if scale is None else part * scale[first : first + _CHUNK].double()).T
    return BlockProducts(gram.view(gradients, count, gradients, count), paired)
