"""JobConfig."""

from dataclasses import dataclass
from typing import Literal

from torchtitan.settings import setting


@dataclass(kw_only=True)
class JobSection:
    """`[job]`"""

    config_file: str = setting("", "TOML file with the keys below", trajectory=False)
    dump_folder: str = setting("outputs", "folder that holds the run folders", trajectory=False)
    name: str = setting("", "name of the run and of its folder; default: the TOML's file name", trajectory=False)
    allow_config_change: bool = setting(
        False, "continue a run folder although keys that change what is learned differ", trajectory=False
    )


@dataclass(kw_only=True)
class TrainingConfig:
    """`[training]`"""

    steps: int = setting(10000, "optimizer steps", ge=1)
    local_batch_size: int = setting(32, "images per rank in one forward", ge=1, trajectory=False)
    global_batch_size: int = setting(
        -1, "images per optimizer step; above ranks x local_batch_size, gradients accumulate; -1: ranks x local", ge=-1
    )
    max_norm: float = setting(1.0, "gradient norm above which gradients are scaled down; 0: no clipping", ge=0)
    mixed_precision_param: Literal["float32", "bfloat16"] = setting(
        "float32", "dtype of compute; weights, optimizer state and EMA are float32 always"
    )
    mixed_precision_reduce: Literal["float32"] = setting("float32", "dtype of the gradient reduction")


@dataclass(kw_only=True)
class DebugConfig:
    """`[debug]`"""

    seed: int = setting(0, "decides weights, noise, timesteps, data order: everything random", ge=0)
    deterministic: bool = setting(False, "use only deterministic kernels", trajectory=False)
