"""Which process holds what."""

from dataclasses import dataclass

from torchtitan.settings import setting


@dataclass(kw_only=True)
class ParallelismConfig:
    """`[parallelism]`: replicate degree x shard degree = number of processes."""

    data_parallel_replicate_degree: int = setting(
        1, "copies of the model; -1 is what is left", ge=-1, trajectory=False
    )
    data_parallel_shard_degree: int = setting(
        -1, "processes that share one copy (1: DDP; above: FSDP2, or HSDP with copies); -1 is what is left", ge=-1,
        trajectory=False,
    )


@dataclass(kw_only=True)
class CommConfig:
    """`[comm]`"""

    init_timeout_seconds: int = setting(300, "collective timeout until the first step is done", ge=1, trajectory=False)
    train_timeout_seconds: int = setting(100, "collective timeout after the first step", ge=1, trajectory=False)
