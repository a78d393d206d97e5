"""Images drawn from the model during and after training."""

from dataclasses import dataclass
from typing import Literal

from torchtitan.settings import setting


@dataclass(kw_only=True)
class SamplingConfig:
    """`[sampling]`: the grids drawn during training, and the defaults of scripts/sample.py."""

    enable: bool = setting(True, "draw a grid of samples at intervals and at the end", trajectory=False)
    interval: int = setting(1000, "steps between grids", ge=1, applies={"enable": (True,)}, trajectory=False)
    solver: Literal["euler", "heun"] = setting(
        "euler", "integrator of the probability-flow equation", applies={"enable": (True,)}, trajectory=False
    )
    num_steps: int = setting(50, "solver steps from noise to image", ge=1, applies={"enable": (True,)}, trajectory=False)
    guidance_scale: float = setting(
        2.0, "classifier-free guidance: 1 is none", ge=0, applies={"enable": (True,)}, trajectory=False
    )
    classes: list[int] = setting(
        [], "classes of the grid, a row each; empty: the first ten", applies={"enable": (True,)}, trajectory=False
    )
    images_per_class: int = setting(8, "columns of the grid", ge=1, applies={"enable": (True,)}, trajectory=False)
    ema_track: str = setting(
        "ema", "weights to sample with: a name of ema.tracks, or 'none' for the trained weights",
        applies={"enable": (True,)}, trajectory=False,
    )
    judge_images: int = setting(
        0, "images drawn at the end and judged against real ones; 0: none (the dataset must have a judge)", ge=0,
        applies={"enable": (True,)}, trajectory=False,
    )
    batch_size: int = setting(
        256, "images drawn at a time on each rank", ge=1, applies={"enable": (True,)}, trajectory=False
    )
