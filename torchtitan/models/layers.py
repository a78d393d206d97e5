"""Layers and checks shared by several families of networks; gradient taps know the layers."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan.conditions import Classes, Condition
from torchtitan.models.base import DiffusionModel


class RMSNorm(nn.Module):
    """RMS norm x / rms(x), over the last dimension, times a learned gain if affine."""

    def __init__(self, dim: int, eps: float, affine: bool = True) -> None:
        super().__init__()
        self.shape, self.eps = (dim,), eps
        self.weight = nn.Parameter(torch.empty(dim)) if affine else None

    def forward(self, x: Tensor) -> Tensor:
        # Under autocast the gain is float32 and x bfloat16: a mixture that has no fused kernel.
        return F.rms_norm(x, self.shape, None if self.weight is None else self.weight.to(x.dtype), self.eps)


def check_inputs(model: DiffusionModel, x: Tensor, condition: Condition) -> None:
    """Check the inputs of a model of classes or of no condition. Raises ValueError, see `DiffusionModel.forward`."""
    if x.ndim != 4 or x.shape[1:] != model.image_shape:
        raise ValueError(f"x is {tuple(x.shape)}; this model takes B images of (C, H, W) = {model.image_shape}")
    kind = model.condition_kind
    if (condition is None) == isinstance(kind, Classes):
        wanted = f"classes, or {kind.count} for no class" if isinstance(kind, Classes) else "no condition"
        raise ValueError(f"condition is {'missing' if condition is None else 'given'}: this model takes {wanted}")
