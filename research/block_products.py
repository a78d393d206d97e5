"""Inner products of several true gradients, unbiased, from mean gradients of blocks of samples."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

_CHUNK = 1 << 16  # elements of a gradient at a time


@dataclass(frozen=True)
class BlockProducts:
    """Inner products of blocks' mean gradients; K gradients of n blocks each, no two blocks with a common sample.

    Attributes:
        gram: float64 [K, n, K, n].
    """

    gram: Tensor

    @property
    def values(self) -> Tensor:
        """Products G_i'P G_j of the true gradients, float64 [K, K], symmetric; a diagonal element may be negative.

        Of different gradients all pairs of blocks count, of one with itself those of different blocks: noise that is
        independent adds nothing to either in expectation.
        """
        return _unbiased(self.gram)

    @property
    def errors(self) -> Tensor:
        """Standard errors of the values by the jackknife over blocks, [K, K]."""
        return self.error_of(lambda values: values)

    def error_of(self, statistic: Callable[[Tensor], Tensor]) -> Tensor:
        """Standard error of a function of the values by the jackknife: block i of every gradient is left out together."""
        count = self.gram.shape[1]
        kept = [[other for other in range(count) if other != block] for block in range(count)]
        left = torch.stack([statistic(_unbiased(self.gram[:, some][:, :, :, some])) for some in kept])
        return ((count - 1) * left.var(0, correction=0)).sqrt()


def block_products(blocks: Tensor, scale: Tensor | None = None) -> BlockProducts:
    """Products of blocks of mean gradients.

    Args:
        blocks: mean gradients of equally many samples, [K, n, P], n at least 3.
        scale: diagonal of P, positive [P]; None: the identity.

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
    return BlockProducts(gram.view(gradients, count, gradients, count))


def _unbiased(gram: Tensor) -> Tensor:
    count = gram.shape[1]
    values = gram.mean((1, 3))
    own = torch.einsum("iaib->iab", gram)
    pairs = own.sum((1, 2)) - own.diagonal(dim1=1, dim2=2).sum(1)
    return torch.where(torch.eye(len(gram), dtype=torch.bool), (pairs / (count * (count - 1))).diag(), values)
