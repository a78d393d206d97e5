"""Activation checkpointing: recompute activations in backward instead of keeping them."""

import logging
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from torchtitan.distributed.config import ActivationCheckpointConfig

# The operations that dominate a block's time, on every device; mode `selective` keeps their results.
_KEPT = [
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_mm.default,
    torch.ops.aten.convolution.default,
    # Each also returns the log-sum-exp of the scores, without which its backward would need the scores anew.
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
]

# The prefix that the wrapper adds to names of parameters.
WRAPPER_PREFIX = "_checkpoint_wrapped_module."


def checkpoint_blocks(model: nn.Module, blocks: list[nn.Module], config: ActivationCheckpointConfig) -> None:
    """Wrap blocks of the model to recompute their activations.

    Does nothing in mode memory_budget, which belongs to the compiler: see torchtitan.distributed.compile.

    Args:
        blocks: modules of the model, in the order of the forward.

    Raises:
        ValueError: there is no block.
    """
    if config.mode in ("none", "memory_budget"):
        return
    if not blocks:
        raise ValueError(f"activation_checkpoint.mode = {config.mode}: {type(model).__name__} has no blocks")
    options: dict[str, Any] = {}
    if config.mode == "selective":
        # Where it is compiled, torch warns of operations in place that a block might have; ours have none.
        logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _KEPT)
    names = {id(module): name for name, module in model.named_modules()}
    for block in blocks[:: config.every]:
        parent, _, child = names[id(block)].rpartition(".")
        # A block draws no random numbers of a generator, so there is no state to restore.
        wrapped = checkpoint_wrapper(block, preserve_rng_state=False, **options)
        model.get_submodule(parent).register_module(child, wrapped)
