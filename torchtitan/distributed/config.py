"""`[parallelism]`, `[comm]`, `[compile]` and `[activation_checkpoint]`: their keys, and what cannot be combined."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
import torch._functorch.config as functorch_config

from torchtitan.distributed.degrees import Degrees
from torchtitan.settings import only_enabled, setting


@dataclass(kw_only=True)
class ParallelismConfig:
    """`[parallelism]`: replicate degree x shard degree x context degree = number of processes."""

    data_parallel_replicate_degree: int = setting(
        1, "copies of the model; -1: as many as remain", ge=-1, trajectory=False
    )
    data_parallel_shard_degree: int = setting(
        -1, "processes that share one copy (1: DDP; above: FSDP2, or HSDP with copies); -1: as many as remain", ge=-1,
        trajectory=False,
    )
    context_parallel_degree: int = setting(
        1, "processes that share the tokens of each image, for images of many tokens; dit only", ge=1, le=65536,
        trajectory=False,
    )
    fsdp_reshard_after_forward: Literal["default", "always", "never"] = setting(
        "default", "where weights that a forward gathered are released, to be gathered again for the backward: in blocks; in the "
        "layers around them too (always); nowhere (never)", trajectory=False,
    )

    @property
    def degrees(self) -> Degrees:
        """The three degrees, once they are resolved."""
        return Degrees(self.data_parallel_replicate_degree, self.data_parallel_shard_degree, self.context_parallel_degree)

    @property
    def data_ranks(self) -> int:
        """Number of ranks with different images, from resolved degrees."""
        return self.degrees.data_ranks

    @property
    def processes(self) -> int:
        return self.degrees.processes


def parallelism_problems(config: ParallelismConfig, shards: int) -> Iterator[tuple[str, str]]:
    """Find settings of FSDP2 without effect: (key, what is wrong and what to do).

    Args:
        shards: processes that share the parameters of one replica.
    """
    whole = "has no effect without shards, whose weights FSDP2 gathers"
    if shards == 1 and config.fsdp_reshard_after_forward != "default":
        yield "fsdp_reshard_after_forward", f"{whole} (set default, or data_parallel_shard_degree above 1)"


@dataclass(kw_only=True)
class CommConfig:
    """`[comm]`"""

    init_timeout_seconds: int = setting(
        300, "collective timeout until the first step is done; 5.4 times it is the longest time without a forward in "
        "validation, sampling, checkpoints, start-up and compilation, for a single process in any phase", ge=1,
        le=31_536_000, trajectory=False,
    )
    train_timeout_seconds: int = setting(
        100, "collective timeout after the first step; no phase of a step may last longer on several ranks", ge=1,
        le=31_536_000, trajectory=False,
    )


CUDA_GRAPH_MODES = ("reduce-overhead", "max-autotune")


@only_enabled()
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
    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = setting(
        "default", "work of the compiler: reduce-overhead: CUDA graphs of each block; max-autotune: kernels chosen by timing "
        "them, with CUDA graphs or without", trajectory=False,
    )  # fmt: skip

    @property
    def cuda_graphs(self) -> bool:
        return self.enable and self.mode in CUDA_GRAPH_MODES


def compile_problems(config: CompileConfig, shards: int, has_cuda: bool | None = None) -> Iterator[tuple[str, str]]:
    """Find combinations that cannot be compiled: (key, what is wrong and what to do).

    Args:
        shards: processes that share the parameters of one replica.
        has_cuda: whether the run has a CUDA device; None: if this process has.
    """
    if config.enable and config.scope == "model" and shards > 1:
        yield "scope", "model needs parameters that are not sharded: FSDP gathers them block by block (set blocks)"
    if not config.cuda_graphs:
        return
    remedy = "set max-autotune-no-cudagraphs" if config.mode == "max-autotune" else "set default"
    if not (torch.cuda.is_available() if has_cuda is None else has_cuda):
        yield "mode", f"{config.mode} replays CUDA graphs, and CUDA is not there ({remedy})"
    elif shards > 1:
        yield "mode", f"{config.mode} replays CUDA graphs at fixed addresses, and FSDP gathers weights anew ({remedy})"
    elif config.scope == "model":
        text = "overwrites the model's last output, which guidance and solvers still read"
        yield "mode", f"{config.mode}: a CUDA graph of the whole model {text} ({remedy}, or scope to blocks)"


CheckpointMode = Literal["none", "selective", "full", "memory_budget"]


@dataclass(kw_only=True)
class ActivationCheckpointConfig:
    """`[activation_checkpoint]`"""

    mode: CheckpointMode = setting(
        "none",
        "recomputed in backward: selective: all but products, convolutions and attention; full: whole blocks; memory_budget: "
        "the compiler's choice",
        trajectory=False,
    )
    every: int = setting(
        1, "recompute every n-th block only, from the first on", ge=1, applies={"mode": ("selective", "full")},
        trajectory=False,
    )
    memory_budget: float = setting(
        0.5, "activations to keep, as a share of the bytes kept without recomputation; 0: blocks' inputs only",
        ge=0, le=1, applies={"mode": ("memory_budget",)}, trajectory=False,
    )  # fmt: skip


def checkpoint_problems(
    config: ActivationCheckpointConfig, compiled: bool, num_blocks: int | None
) -> Iterator[tuple[str, str]]:
    """Find combinations that cannot work or are ignored (num_blocks None: unknown): key, what is wrong, what to do."""
    if config.mode in ("selective", "full") and num_blocks is not None and config.every > num_blocks:
        advice = f"set at most {num_blocks}: the first alone"
        yield "every", f"{config.every} is more than the model's {num_blocks} blocks ({advice})"
    if config.mode == "memory_budget" and not compiled:
        text = "memory_budget is the compiler's work (set compile.enable to true, or choose selective or full)"
        yield "mode", text
    elif config.mode == "memory_budget" and not hasattr(functorch_config, "activation_memory_budget"):
        text = f"torch {torch.__version__} has no memory budget (choose selective or full, or install a newer torch)"
        yield "mode", text
