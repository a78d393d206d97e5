"""Activation checkpointing: recompute activations in backward instead of keeping them."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch._functorch.config as functorch_config
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from torchtitan.settings import setting


@dataclass(kw_only=True)
class ActivationCheckpointConfig:
    """`[activation_checkpoint]`"""

    mode: Literal["none", "selective", "full", "memory_budget"] = setting(
        "none",
        "recomputed in backward: nothing; all but the results in `keep`; whole blocks; the compiler's choice",
        trajectory=False,
    )
    every: int = setting(
        1, "recompute every n-th block only, from the first on", ge=1, applies={"mode": ("selective", "full")},
        trajectory=False,
    )
    keep: list[Literal["matmul", "attention"]] = setting(
        ["matmul", "attention"], "results that are kept: of matrix products, of attention",
        applies={"mode": ("selective",)}, trajectory=False,
    )  # fmt: skip
    memory_budget: float = setting(
        0.5, "activations to keep, as a share of the bytes kept without recomputation; 0: blocks' inputs only",
        ge=0, le=1, applies={"mode": ("memory_budget",)}, trajectory=False,
    )  # fmt: skip


# The operations that dominate a block's time, on every device.
_OPERATIONS = {
    "matmul": [
        torch.ops.aten.mm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten._scaled_mm.default,
    ],
    # Each also returns the log-sum-exp of the scores, without which its backward would need the scores anew.
    "attention": [
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    ],
}

# The prefix that the wrapper adds to names of parameters.
WRAPPER_PREFIX = "_checkpoint_wrapped_module."


def checkpoint_problems(
    config: ActivationCheckpointConfig, compiled: bool, num_blocks: int | None
) -> Iterator[tuple[str, str]]:
    """Find combinations that cannot work or would be ignored.

    Args:
        config: the section.
        compiled: whether blocks are compiled.
        num_blocks: blocks of the model, None if it does not say.

    Yields:
        (key, what is wrong and what to do).
    """
    if config.mode == "selective" and not config.keep:
        yield "keep", "is empty, so all is recomputed (name matmul, attention or both, or set mode to full)"
    if config.mode == "selective" and len(set(config.keep)) < len(config.keep):
        yield "keep", f"names {config.keep[-1]} twice (remove one)"
    if config.mode in ("selective", "full") and num_blocks is not None and config.every > num_blocks:
        advice = f"set at most {num_blocks}: the first alone"
        yield "every", f"{config.every} is more than the model's {num_blocks} blocks ({advice})"
    if config.mode == "memory_budget" and not compiled:
        text = "memory_budget is the compiler's work (set compile.enable to true, or choose selective or full)"
        yield "mode", text
    elif config.mode == "memory_budget" and not hasattr(functorch_config, "activation_memory_budget"):
        text = f"torch {torch.__version__} has no memory budget (choose selective or full, or install a newer torch)"
        yield "mode", text


def checkpoint_blocks(model: nn.Module, blocks: list[nn.Module], config: ActivationCheckpointConfig) -> None:
    """Wrap blocks of the model to recompute their activations.

    Does nothing in mode memory_budget, which belongs to the compiler: see torchtitan.distributed.compile.

    Args:
        model: the model that holds the blocks.
        blocks: modules of the model, in the order of the forward.
        config: choice of the blocks, and the results that they keep.

    Raises:
        ValueError: there is no block.
    """
    if config.mode in ("none", "memory_budget"):
        return
    if not blocks:
        raise ValueError(f"activation_checkpoint.mode = {config.mode}: {type(model).__name__} has no blocks")
    options: dict[str, Any] = {}
    if config.mode == "selective":
        kept = [operation for name in config.keep for operation in _OPERATIONS[name]]
        options["context_fn"] = partial(create_selective_checkpoint_contexts, kept)
    names = {id(module): name for name, module in model.named_modules()}
    for block in blocks[:: config.every]:
        parent, _, child = names[id(block)].rpartition(".")
        # A block draws no random numbers, so there is no generator state to restore.
        wrapped = checkpoint_wrapper(block, preserve_rng_state=False, **options)
        model.get_submodule(parent).register_module(child, wrapped)
