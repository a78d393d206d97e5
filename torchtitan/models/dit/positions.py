"""Fixed tables of positions: sines and cosines that are added to tokens, and angles by which queries and keys are rotated."""

import torch
from torch import Tensor


def sincos_table(dim: int, grid: tuple[int, int]) -> Tensor:
    """Fixed 2-D position table [T, dim], float64: a quarter each of sin and cos of the column, sin and cos of the row.

    Source: the paper's public weights; the first half belongs to the column.
    """
    columns, rows = _grid_angles(dim // 4, grid)  # each [T, dim / 4]
    return torch.cat((columns.sin(), columns.cos(), rows.sin(), rows.cos()), dim=-1)


def rotary_table(head_dim: int, grid: tuple[int, int]) -> Tensor:
    """Cosines and sines [2, T, head_dim / 2], float64: half of the angles go with the column, half with the row.

    Source: Su et al., "RoFormer", arXiv 2104.09864, equation 34, applied to each axis.
    """
    angles = torch.cat(_grid_angles(head_dim // 4, grid), dim=-1)  # [T, head_dim / 2]
    return torch.stack((angles.cos(), angles.sin()))


def _grid_angles(count: int, grid: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Column and row number of each token times `count` frequencies 10000^(-i / count), each [T, count]."""
    frequencies = 10000.0 ** (-torch.arange(count, dtype=torch.float64) / count)
    rows, columns = torch.meshgrid(*(torch.arange(n, dtype=torch.float64) for n in grid), indexing="ij")
    return columns.reshape(-1, 1) * frequencies, rows.reshape(-1, 1) * frequencies
