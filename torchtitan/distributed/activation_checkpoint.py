"""Activation checkpointing: recompute activations in backward instead of keeping them."""

from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from torchtitan.settings import setting


@dataclass(kw_only=True)
class ActivationCheckpointConfig:
    """`[activation_checkpoint]`"""

    mode: Literal["none", "selective", "full"] = setting(
        "none", "recompute in backward: nothing; all but matrix products and attention; every block whole",
        trajectory=False,
    )


# What selective mode keeps: the operations that dominate a block's time, on every device.
_KEPT = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_mm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
}

# The prefix that the wrapper adds to names of parameters.
WRAPPER_PREFIX = "_checkpoint_wrapped_module."


def checkpoint_blocks(model: nn.Module, blocks: list[nn.Module], mode: str) -> None:
    """Replace each block in the model by one that recomputes its activations.

    Args:
        model: the model that holds the blocks.
        blocks: modules of the model.
        mode: "none", "selective" (matrix products and attention are kept) or "full".
    """
    if mode == "none":
        return
    options = {} if mode == "full" else {"context_fn": partial(create_selective_checkpoint_contexts, _policy)}
    names = {id(module): name for name, module in model.named_modules()}
    for block in blocks:
        parent, _, child = names[id(block)].rpartition(".")
        # A block draws no random numbers, so there is no generator state to restore.
        wrapped = checkpoint_wrapper(block, preserve_rng_state=False, **options)
        model.get_submodule(parent).register_module(child, wrapped)


def _policy(context, operation, *args, **kwargs) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE
