"""Products and distances of the rows of two sets, in float64 blocks, so that memory does not grow with the sets."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

_ROWS = 2048  # a block of distances takes 32 MiB
# Squared distances below this share of the squared norms are rounding errors of equal rows.
_ROUNDING = 1e-12


def row_blocks(rows: np.ndarray, device: str, origin: np.ndarray | float = 0.0) -> Iterator[tuple[slice, Tensor]]:
    """Blocks of rows minus an origin, float64 on the device, with their places."""
    for first in range(0, len(rows), _ROWS):
        place = slice(first, min(first + _ROWS, len(rows)))
        yield place, torch.from_numpy(rows[place].astype(np.float64) - origin).to(device)  # [_ROWS, D]


def squared_distances(a: Tensor, b: Tensor) -> Tensor:
    """Squared Euclidean distances between rows, [N, D] and [M, D] to [N, M]; exactly 0 where rows are equal.

    |a|² + |b|² - 2 a·b in float64: the relative error is about 1e-15 times the squared norms over the squared distance.
    """
    norms = a.square().sum(dim=1)[:, None] + b.square().sum(dim=1)  # [N, M]
    squared = torch.addmm(norms, a, b.T, alpha=-2)
    return squared.masked_fill_(squared < _ROUNDING * norms, 0.0)


def squared_neighbour_distances(rows: np.ndarray, others: np.ndarray, rank: int, device: str) -> Tensor:
    """Squared distance of each row [N, D] from its `rank`-th nearest other row [M, D], float64 [N] on the CPU.

    A set's own rows are neighbours at distance 0: within one set the k-th neighbour has the rank k + 1.
    """
    origin = others.mean(axis=0, dtype=np.float64)
    found = torch.empty(len(rows), dtype=torch.float64)
    for place, block in row_blocks(rows, device, origin):
        nearest = torch.full((len(block), rank), torch.inf, dtype=torch.float64, device=device)
        for _, other in row_blocks(others, device, origin):
            candidates = torch.cat([nearest, squared_distances(block, other)], dim=1)
            nearest = candidates.topk(rank, dim=1, largest=False).values  # [N, rank], ascending
        found[place] = nearest[:, -1].cpu()
    return found
