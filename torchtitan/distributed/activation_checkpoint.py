"""Activation checkpointing."""

from dataclasses import dataclass
from typing import Literal

from torchtitan.settings import setting


@dataclass(kw_only=True)
class ActivationCheckpointConfig:
    """`[activation_checkpoint]`"""

    mode: Literal["none", "selective", "full"] = setting(
        "none", "recompute in backward: nothing; all but matrix products and attention; every block whole",
        trajectory=False,
    )
