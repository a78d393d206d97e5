"""RMS norm and SiLU as CUDA computes them, in one kernel each way, for tensors without values.

torch composes them of other operations where it has no kernel for a device, and so on an imitated one: a norm in float32, whose
backward then keeps the input in float32, with a gain the normed input too, instead of the input as it is; and SiLU's backward.
Of the operations of these networks no others are composed on an imitated device alone.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import Function

_LIBRARY = "torchtitan_estimate"
_composed_rms_norm, _composed_silu = F.rms_norm, F.silu


@torch.library.custom_op(f"{_LIBRARY}::fused_rms_norm", mutates_args=())
def _rms_norm_forward(x: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    raise NotImplementedError("for tensors without values")


@_rms_norm_forward.register_fake
def _(x: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    statistics = torch.promote_types(x.dtype, torch.float32)
    return torch.empty_like(x, memory_format=torch.contiguous_format), x.new_empty((*x.shape[:-1], 1), dtype=statistics)


@torch.library.custom_op(f"{_LIBRARY}::fused_rms_norm_backward", mutates_args=())
def _rms_norm_backward(dy: Tensor, x: Tensor, rstd: Tensor, weight: Tensor | None) -> list[Tensor]:
    raise NotImplementedError("for tensors without values")


@_rms_norm_backward.register_fake
def _(dy: Tensor, x: Tensor, rstd: Tensor, weight: Tensor | None) -> list[Tensor]:
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    return [dx] if weight is None else [dx, torch.empty_like(weight)]


@torch.library.custom_op(f"{_LIBRARY}::silu_backward", mutates_args=())
def _silu_backward(dy: Tensor, x: Tensor) -> Tensor:
    raise NotImplementedError("for tensors without values")


@_silu_backward.register_fake
def _(dy: Tensor, x: Tensor) -> Tensor:
    return torch.empty_like(x)


class _RMSNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None) -> Tensor:
        y, rstd = _rms_norm_forward(x, weight)
        ctx.save_for_backward(x, rstd, weight)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        dx, *of_weight = _rms_norm_backward(dy, *ctx.saved_tensors)
        return dx, *(of_weight or [None])


class _SiLU(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return _composed_silu(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return _silu_backward(dy, *ctx.saved_tensors)


@contextmanager
def cuda_kernels(device: str) -> Iterator[None]:
    """Compute RMS norm and SiLU of a device as CUDA does inside the context; not while something compiles, which composes them.

    The functions are replaced, since a mode of torch is not there where a backward computes a block again.

    Args:
        device: type of the device, such as "cuda"; tensors with values are left alone.
    """

    def chosen(composed: Callable[..., Tensor], kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def choose(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            imitated = isinstance(x, FakeTensor) and x.device.type == device
            return (kernel if imitated and not torch.compiler.is_compiling() else composed)(x, *args, **kwargs)

        return choose

    with (
        patch.object(F, "rms_norm", chosen(_composed_rms_norm, _rms_norm)),
        patch.object(F, "silu", chosen(_composed_silu, _silu)),
    ):
        yield


def _rms_norm(x: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    if len(normalized_shape) != 1 or (weight is not None and weight.dtype != x.dtype):  # CUDA composes it, too
        return _composed_rms_norm(x, normalized_shape, weight, eps)
    return _RMSNorm.apply(x, weight)


def _silu(x: Tensor, inplace: bool = False) -> Tensor:
    return _composed_silu(x, inplace) if inplace else _SiLU.apply(x)
