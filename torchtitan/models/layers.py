"""Layers and checks shared by several families of networks; gradient taps know the layers."""

import math
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan.conditions import Classes, Condition
from torchtitan.models.base import DiffusionModel

SINUSOID_CHANNELS = 256


class LayerNorm(nn.LayerNorm):
    """Layer norm over the last dimension, times a learned gain if affine, in its input's dtype; no bias."""

    def __init__(self, dim: int, eps: float, affine: bool = True) -> None:
        super().__init__(dim, eps, elementwise_affine=affine, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return normed(x, self.weight, self.eps)


class RMSNorm(nn.Module):
    """RMS norm x / rms(x), over the last dimension, times a learned gain if affine, in its input's dtype."""

    def __init__(self, dim: int, eps: float, affine: bool = True) -> None:
        super().__init__()
        self.shape, self.eps = (dim,), eps
        self.weight = nn.Parameter(torch.empty(dim)) if affine else None

    def forward(self, x: Tensor) -> Tensor:
        return normed(x, self.weight, self.eps, rms=True)


class TokenBias(nn.Module):
    """Learned elements added to an input [B, ...], as a table of positions [T, D] or a mask token [D], in its input's dtype.

    Args:
        shape: what is broadcast over the samples, and over any other axes.
    """

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight.to(x.dtype)


class TokenGain(nn.Module):
    """Learned elements that multiply an input [B, ...], as a layer scale [D] or a scalar [1]; otherwise as TokenBias."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight.to(x.dtype)


class VectorEmbedding(nn.Module):
    """Linear, SiLU, linear, of one vector per image."""

    def __init__(self, channels: int, dim: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(channels, dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.silu(self.hidden(x.to(self.hidden.weight.dtype))))  # [B, D]


class FourierFeatures(nn.Module):
    """Sines, then cosines, of 2 pi w t / 1000 with fixed random frequencies w of N(0, 1): of times t [B] in 0..1000,
    [B, 2 channels].

    The frequencies are saved with the weights. Source: Tancik et al., "Fourier features let networks learn high frequency
    functions in low dimensional domains", arXiv 2006.10739, equation 5.
    """

    frequencies: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.empty(channels))

    def forward(self, t: Tensor) -> Tensor:
        t = t.to(torch.promote_types(t.dtype, torch.float32))
        angles = 2.0 * math.pi / 1000.0 * t[..., None] * self.frequencies.to(t.dtype)
        return torch.cat((angles.sin(), angles.cos()), dim=-1)


def normed(x: Tensor, gain: Tensor | None, eps: float, rms: bool = False) -> Tensor:
    """Layer norm, or RMS norm, over the last dimension, in x's dtype; gain: [D] or None."""
    gain = None if gain is None else gain.to(x.dtype)
    with own_dtype(x):
        return F.rms_norm(x, x.shape[-1:], gain, eps) if rms else F.layer_norm(x, x.shape[-1:], gain, None, eps)


def group_norm(x: Tensor, groups: int) -> Tensor:
    """Group norm of images [B, C, ...] without a gain, in x's dtype."""
    with own_dtype(x):
        return F.group_norm(x, groups)


def own_dtype(x: Tensor) -> AbstractContextManager:
    """Context without autocast, which widens norms and nearest-neighbour upsampling on CUDA, not on the CPU: a copy of x in
    float32, and all up to the next product in float32. Kernels of norms compute statistics of bfloat16 in float32 themselves,
    and a gain of float32 with an input of bfloat16 has no fused kernel.
    """
    if x.is_meta or not torch.is_autocast_enabled(x.device.type):
        return nullcontext()
    return torch.autocast(x.device.type, enabled=False)


def check_inputs(model: DiffusionModel, x: Tensor, condition: Condition) -> None:
    """Check the inputs of a model of classes or of no condition. Raises ValueError, see `DiffusionModel.forward`."""
    if x.ndim != 4 or x.shape[1:] != model.image_shape:
        raise ValueError(f"x is {tuple(x.shape)}; this model takes B images of (C, H, W) = {model.image_shape}")
    kind = model.condition_kind
    if (condition is None) == isinstance(kind, Classes):
        wanted = f"classes, or {kind.count} for no class" if isinstance(kind, Classes) else "no condition"
        raise ValueError(f"condition is {'missing' if condition is None else 'given'}: this model takes {wanted}")


def patchify(x: Tensor, patch_size: int) -> Tensor:
    """Cut images [B, C, H, W] into tokens [B, T, C p p]: rows of patches from the top, channels outermost inside."""
    x = x.unflatten(3, (-1, patch_size)).unflatten(2, (-1, patch_size))  # [B, C, H / p, p, W / p, p]
    return x.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def unpatchify(x: Tensor, grid: tuple[int, int], patch_size: int) -> Tensor:
    """Inverse of patchify: tokens [B, T, C p p] on a grid of (H / p, W / p) to images [B, C, H, W]."""
    x = x.unflatten(2, (-1, patch_size, patch_size)).unflatten(1, grid)  # [B, H / p, W / p, C, p, p]
    # In one step and contiguous: FSDP2 warns of an output that is a view, of a copy or, with patches of one pixel, of x.
    return x.permute(0, 3, 1, 4, 2, 5).reshape(len(x), -1, grid[0] * patch_size, grid[1] * patch_size).contiguous()


def at_least_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def timestep_sinusoid(t: Tensor, channels: int, *, reach_lowest: bool = False) -> Tensor:
    """Cosines, then sines, of t at frequencies from 1 down to nearly 1 / 10,000.

    Args:
        t: times [B] or [B, T]; the frequencies suit a range of about [0, 1000].
        channels: even.
        reach_lowest: the last frequency is 1 / 10,000 itself.

    Returns:
        [..., channels], float32 or t's dtype, whichever is finer: bfloat16 has no phase left at t = 1000.
    """
    t = t.to(torch.promote_types(t.dtype, torch.float32))
    steps = channels // 2 - reach_lowest
    exponents = -math.log(10000.0) * torch.arange(channels // 2, dtype=t.dtype, device=t.device) / steps
    angles = t[..., None] * torch.exp(exponents)  # [..., channels / 2]
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def rotate(x: Tensor, rotary: Tensor) -> Tensor:
    """Rotate channel i against channel i + D / N / 2 of queries or keys [B, N, T, D / N] by the angles of a table.

    The table [2, T, D / N / 2] is float32, which makes the arithmetic and the result float32 when x is bfloat16.
    """
    cos, sin = rotary.unbind(0)  # each [T, D / N / 2]
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Scale and shift tokens [B, T, D] by (1 + scale) and shift, each [B, 1, D] (adaLN)."""
    return torch.addcmul(shift, x, 1 + scale)
