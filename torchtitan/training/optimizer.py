"""The optimizer."""

from dataclasses import dataclass
from typing import Literal

from torchtitan.settings import setting


@dataclass(kw_only=True)
class OptimizerConfig:
    """`[optimizer]`"""

    name: Literal["AdamW"] = setting("AdamW", "update rule")
    lr: float = setting(1e-4, "peak learning rate", gt=0)
    beta1: float = setting(0.9, "decay of the first moment per step", ge=0, lt=1)
    beta2: float = setting(0.999, "decay of the second moment per step", ge=0, lt=1)
    eps: float = setting(1e-8, "added to the root of the second moment", gt=0)
    weight_decay: float = setting(0.0, "decoupled weight decay on matrices; gains, biases and tables have none", ge=0)
