"""Kernel choices of a process: attention's implementation, and the precision of float32 matrix products."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Literal

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

AttentionBackend = Literal["auto", "flash", "cudnn", "efficient", "math"]
Float32MatmulPrecision = Literal["highest", "high", "medium"]

_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION, "math": SDPBackend.MATH,
}  # fmt: skip
_CUDA_ONLY = ("cudnn", "efficient")
_HALF_PRECISION_ON_CUDA = ("flash", "cudnn")
_CUDNN_MULTIPLE = 8  # of channels in a head


class KernelError(Exception):
    """Chosen kernel that this device does not have; the message is one line."""


@contextmanager
def kernel_choices(attention: AttentionBackend, float32_matmul: Float32MatmulPrecision) -> Iterator[None]:
    """Choose the process's kernels within the block: for forward, backward, recomputation and sampling alike.

    Args:
        attention: implementation of scaled_dot_product_attention; auto: torch chooses for each call.
    """
    before = torch.get_float32_matmul_precision()
    with ExitStack() as stack:
        if attention != "auto":
            stack.enter_context(sdpa_kernel(_BACKENDS[attention]))
        torch.set_float32_matmul_precision(float32_matmul)
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before)


def kernel_problems(
    attention: AttentionBackend, float32_matmul: Float32MatmulPrecision, param_dtype: str, head_width: int | None,
    has_cuda: bool | None = None,
) -> Iterator[tuple[str, str]]:
    """Find choices without effect, or that this device refuses: (key of `[training]`, what is wrong, what to do).

    Args:
        head_width: channels of an attention head, None if the model does not say.
        has_cuda: whether the run has a CUDA device; None: if this process has.
    """
    on_cuda = torch.cuda.is_available() if has_cuda is None else has_cuda
    if float32_matmul != "highest" and not on_cuda:
        yield "float32_matmul_precision", f"{float32_matmul} is of CUDA's tensor cores, which are not there (set highest)"
    if attention in _CUDA_ONLY and not on_cuda:
        yield "attention_backend", f"{attention} is for CUDA, which is not there (the CPU has flash and math)"
    elif attention in _HALF_PRECISION_ON_CUDA and on_cuda and param_dtype == "float32":
        advice = "set training.mixed_precision_param to bfloat16, or efficient"
        yield "attention_backend", f"{attention} has no float32 kernels ({advice})"
    elif attention == "cudnn" and head_width and head_width % _CUDNN_MULTIPLE:
        text = f"cudnn takes heads of a multiple of {_CUDNN_MULTIPLE} channels, and these have {head_width}"
        yield "attention_backend", f"{text} (set flash, which pads them)"


def check_attention(attention: AttentionBackend, head_width: int, dtype: torch.dtype, device: torch.device) -> None:
    """Check by one small call that a device has the chosen attention. Raises KernelError."""
    if attention == "auto":
        return
    q = torch.zeros(1, 1, 16, head_width, dtype=dtype, device=device, requires_grad=True)
    try:
        with sdpa_kernel(_BACKENDS[attention]):
            F.scaled_dot_product_attention(q, q, q)
    except RuntimeError as error:
        raise KernelError(
            f"training.attention_backend: {attention} has no kernel for heads of {head_width} channels in"
            f" {str(dtype).removeprefix('torch.')} on {device.type} (set auto)"
        ) from error
