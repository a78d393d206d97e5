"""CUDA's kernel of RMS norm on CPU tensors, to count what a GPU would keep.

The CPU composes the norm of other operations, and the backward of a composed norm keeps its input in float32, with a gain the
normed input too. CUDA's kernel keeps the input in its own dtype and one number per row. The other operations of the networks
are not composed on any device.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.library import Library

from torchtitan.models.layers import at_least_float32


@contextmanager
def cuda_kernels() -> Iterator[None]:
    """Have RMS norms on the CPU compute and keep what CUDA's do inside the context, in this process."""
    library = Library("aten", "IMPL")
    try:
        library.impl("_fused_rms_norm", _rms_norm, "CPU")
        library.impl("_fused_rms_norm_backward", _rms_norm_backward, "CPU")
        yield
    finally:
        library._destroy()


def _rms_norm(x: Tensor, normalized_shape: list[int], weight: Tensor | None, eps: float | None) -> tuple[Tensor, Tensor]:
    axes = tuple(range(-len(normalized_shape), 0))
    wide = at_least_float32(x)
    rstd = (wide.square().mean(axes, keepdim=True) + (torch.finfo(wide.dtype).eps if eps is None else eps)).rsqrt()
    normed = wide * rstd
    return (normed if weight is None else normed * weight).to(x.dtype), rstd


def _rms_norm_backward(
    dy: Tensor, x: Tensor, normalized_shape: list[int], rstd: Tensor, weight: Tensor | None, mask: list[bool]
) -> tuple[Tensor | None, Tensor | None]:
    axes = tuple(range(-len(normalized_shape), 0))
    normed, gradient = at_least_float32(x) * rstd, at_least_float32(dy)
    of_normed = gradient if weight is None else gradient * weight
    dx = rstd * (of_normed - normed * (of_normed * normed).mean(axes, keepdim=True))
    of_weight = None
    if weight is not None and mask[1]:
        of_weight = (gradient * normed).sum(tuple(range(x.ndim - len(axes)))).to(weight.dtype)
    return dx.to(x.dtype) if mask[0] else None, of_weight
