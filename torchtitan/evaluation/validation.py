"""Loss on held-out images."""

from dataclasses import dataclass

from torchtitan.settings import setting


@dataclass(kw_only=True)
class ValidationConfig:
    """`[validation]`"""

    enable: bool = setting(False, "measure the loss on held-out images", trajectory=False)
    interval: int = setting(1000, "steps between measurements; also at the last step", ge=1,
                            applies={"enable": (True,)}, trajectory=False)
    num_images: int = setting(1000, "held-out images, each at one fixed timestep with fixed noise", ge=1,
                              applies={"enable": (True,)}, trajectory=False)
    batch_size: int = setting(128, "images at a time on each rank", ge=1, applies={"enable": (True,)}, trajectory=False)
