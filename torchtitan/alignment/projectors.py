"""Projectors from a network's tokens [B, T, D] to features [B, T, C], trained beside it."""

from itertools import pairwise

from torch import Tensor, nn
from torch.nn.functional import silu

_HIDDEN = 2048


class MLPProjector(nn.Module):
    """Three linears with SiLU between them, 2048 wide, drawn as DiT's. Source: REPA, arXiv 2410.06940, and its code."""

    def __init__(self, dim: int, channels: int, grid: tuple[int, int]) -> None:
        super().__init__()
        linears = [nn.Linear(*pair) for pair in pairwise((dim, _HIDDEN, _HIDDEN, channels))]
        for linear in linears:
            nn.init.xavier_uniform_(linear.weight)
            nn.init.zeros_(linear.bias)
        self.linears = nn.ModuleList(linears)

    def forward(self, x: Tensor) -> Tensor:
        first, *others = self.linears
        x = first(x)
        for linear in others:
            x = linear(silu(x))
        return x  # [B, T, C]


class ConvolutionProjector(nn.Module):
    """Convolution of 3x3 tokens, with torch's first values. Source: iREPA, arXiv 2512.10794.

    Args:
        grid: rows and columns of an image's T tokens.
    """

    def __init__(self, dim: int, channels: int, grid: tuple[int, int]) -> None:
        super().__init__()
        self.grid = grid
        self.convolution = nn.Conv2d(dim, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        maps = x.transpose(1, 2).unflatten(2, self.grid)  # [B, D, h, w]
        return self.convolution(maps).flatten(2).transpose(1, 2)  # [B, T, C]
