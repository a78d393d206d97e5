"""The learning-rate schedule."""

from dataclasses import dataclass
from typing import Literal

from torchtitan.settings import setting


@dataclass(kw_only=True)
class LRSchedulerConfig:
    """`[lr_scheduler]`"""

    warmup_steps: int = setting(0, "steps of linear warm-up from 0 to the peak", ge=0)
    decay_type: Literal["constant", "linear", "cosine"] = setting("constant", "shape after warm-up")
    min_lr_factor: float = setting(
        0.0, "learning rate at the last step, as a fraction of the peak", ge=0, le=1,
        applies={"decay_type": ("linear", "cosine")},
    )
