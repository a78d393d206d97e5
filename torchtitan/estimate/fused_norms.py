"""RMS norm as CUDA computes it, in one kernel each way, for tensors without values.

torch has that kernel for CUDA alone. Elsewhere, and so for tensors of an imitated device, it composes the norm of operations in
float32, and the backward keeps the input in float32, with a gain its norm too, instead of the input as it is. Both keep a
number per row.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.overrides import TorchFunctionMode

_LIBRARY = "torchtitan_estimate"


@torch.library.custom_op(f"{_LIBRARY}::fused_rms_norm", mutates_args=())
def _forward(x: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    raise NotImplementedError("for tensors without values")


@_forward.register_fake
def _(x: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    statistics = torch.promote_types(x.dtype, torch.float32)
    return torch.empty_like(x, memory_format=torch.contiguous_format), x.new_empty((*x.shape[:-1], 1), dtype=statistics)


@torch.library.custom_op(f"{_LIBRARY}::fused_rms_norm_backward", mutates_args=())
def _backward(dy: Tensor, x: Tensor, rstd: Tensor, weight: Tensor | None) -> list[Tensor]:
    raise NotImplementedError("for tensors without values")


@_backward.register_fake
def _(dy: Tensor, x: Tensor, rstd: Tensor, weight: Tensor | None) -> list[Tensor]:
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    return [dx] if weight is None else [dx, torch.empty_like(weight)]


class _FusedRMSNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None) -> Tensor:
        y, rstd = _forward(x, weight)
        ctx.save_for_backward(x, rstd, weight)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        dx, *of_weight = _backward(dy, *ctx.saved_tensors)
        return dx, *(of_weight or [None])


class FusedNorms(TorchFunctionMode):
    """Mode in which RMS norms on a device are those of CUDA; not while something compiles, which composes them itself."""

    def __init__(self, device: str) -> None:
        """
        Args:
            device: type of the device, such as "cuda"; of tensors without values.
        """
        super().__init__()
        self._device = device

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is F.rms_norm and args[0].device.type == self._device and not torch.compiler.is_compiling():
            return _rms_norm(*args, **kwargs)
        return func(*args, **kwargs)


def _rms_norm(x: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    if len(normalized_shape) != 1 or (weight is not None and weight.dtype != x.dtype):  # CUDA composes it, too
        return F.rms_norm(x, normalized_shape, weight, eps)
    return _FusedRMSNorm.apply(x, weight)
