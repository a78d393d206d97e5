"""`[parallelism]`, `[comm]`, `[compile]` and `[activation_checkpoint]`: their keys, and what cannot be combined."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
import torch._functorch.config as functorch_config

from torchtitan.settings import only_with, setting


@dataclass(kw_only=True)
class ParallelismConfig:
    """`[parallelism]`: replicate degree x shard degree = number of processes."""

    data_parallel_replicate_degree: int = setting(
        1, "copies of the model; -1: as many as remain", ge=-1, trajectory=False
    )
    data_parallel_shard_degree: int = setting(
        -1, "processes that share one copy (1: DDP; above: FSDP2, or HSDP with copies); -1: as many as remain", ge=-1,
        trajectory=False,
    )


@dataclass(kw_only=True)
class CommConfig:
    """`[comm]`"""

    init_timeout_seconds: int = setting(
        300, "collective timeout until the first step is done", ge=1, le=31_536_000, trajectory=False
    )
    train_timeout_seconds: int = setting(
        100, "collective timeout after the first step; no phase of a step may last longer on several ranks", ge=1,
        le=31_536_000, trajectory=False,
    )
    long_phase_timeout_seconds: int = setting(
        1800, "longest time without a forward in validation, sampling, checkpoints, start-up and compilation; "
        "for a single process, in any phase", ge=1, le=31_536_000, trajectory=False,
    )
    trace_buf_size: int = setting(
        2000, "number of last collectives recorded on a timeout (flight recorder); 0: none", ge=0, le=10_000_000,
        trajectory=False,
    )


@only_with("enable")
@dataclass(kw_only=True)
class CompileConfig:
    """`[compile]`"""

    enable: bool = setting(
        False, "compile the model with torch.compile (needs a C++ compiler on the CPU)", trajectory=False
    )
    scope: Literal["blocks", "model"] = setting(
        "blocks", "unit of compilation: each block, or the whole model, if its parameters are not sharded",
        trajectory=False,
    )  # fmt: skip


def compile_problems(config: CompileConfig, shards: int) -> Iterator[tuple[str, str]]:
    """Find combinations that cannot be compiled.

    Args:
        config: the section.
        shards: processes that share the parameters of one replica.

    Yields:
        (key, what is wrong and what to do).
    """
    if config.enable and config.scope == "model" and shards > 1:
        yield "scope", "model needs parameters that are not sharded: FSDP gathers them block by block (set blocks)"


CheckpointMode = Literal["none", "selective", "full", "memory_budget"]


@dataclass(kw_only=True)
class ActivationCheckpointConfig:
    """`[activation_checkpoint]`"""

    mode: CheckpointMode = setting(
        "none",
        "recomputed in backward: nothing; all but the results in `keep`; whole blocks; the compiler's choice",
        trajectory=False,
    )
    every: int = setting(
        1, "recompute every n-th block only, from the first on", ge=1, applies={"mode": ("selective", "full")},
        trajectory=False,
    )
    keep: list[Literal["matmul", "attention"]] = setting(
        ["matmul", "attention"], "results that are kept: of matrix products and convolutions, of attention",
        applies={"mode": ("selective",)}, trajectory=False,
    )  # fmt: skip
    memory_budget: float = setting(
        0.5, "activations to keep, as a share of the bytes kept without recomputation; 0: blocks' inputs only",
        ge=0, le=1, applies={"mode": ("memory_budget",)}, trajectory=False,
    )  # fmt: skip


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
