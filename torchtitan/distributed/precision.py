"""Precision: float32 weights everywhere, bfloat16 compute by policy."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def compute_context(param_dtype: str, device: torch.device, sharded: bool) -> AbstractContextManager:
    """Context of a forward: autocast where the weights are whole, none where FSDP casts them itself."""
    if sharded or param_dtype == "float32":
        return nullcontext()
    return torch.autocast(device.type, dtype=DTYPES[param_dtype])


def fsdp_policy(param_dtype: str, reduce_dtype: str) -> MixedPrecisionPolicy:
    """FSDP2's cast policy: weights are cast, inputs are not.

    x and t must reach the model, and rotary tables its blocks, in float32; the model casts activations itself. Weights are
    stored in float32, or frozen in bfloat16: for float32 compute none is cast.
    """
    return MixedPrecisionPolicy(
        param_dtype=None if param_dtype == "float32" else DTYPES[param_dtype],
        reduce_dtype=DTYPES[reduce_dtype],
        cast_forward_inputs=False,
    )
