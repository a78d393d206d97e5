"""Layers shared by several families of networks, and known to gradient taps."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """RMS norm x / rms(x), over the last dimension, times a learned gain if affine."""

    def __init__(self, dim: int, eps: float, affine: bool = True) -> None:
        super().__init__()
        self.shape, self.eps = (dim,), eps
        self.weight = nn.Parameter(torch.empty(dim)) if affine else None

    def forward(self, x: Tensor) -> Tensor:
        # Under autocast the gain is float32 and x bfloat16: a mixture that has no fused kernel.
        return F.rms_norm(x, self.shape, None if self.weight is None else self.weight.to(x.dtype), self.eps)
