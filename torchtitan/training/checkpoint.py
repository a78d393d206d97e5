"""Checkpoints."""

from dataclasses import dataclass

from torchtitan.settings import setting


@dataclass(kw_only=True)
class CheckpointConfig:
    """`[checkpoint]`"""

    enable: bool = setting(True, "save checkpoints and resume from the newest good one", trajectory=False)
    interval: int = setting(
        1000, "steps between checkpoints; the last step is always saved", ge=1, applies={"enable": (True,)},
        trajectory=False,
    )
    keep_latest_k: int = setting(
        3, "checkpoints kept, older ones are deleted; 0 keeps all", ge=0, applies={"enable": (True,)}, trajectory=False
    )
    load_step: int = setting(
        -1, "step to resume from; -1 is the newest good one", ge=-1, applies={"enable": (True,)}, trajectory=False
    )
