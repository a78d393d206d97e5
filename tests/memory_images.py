"""Small set of images in memory, and draws of it with their posterior."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from torchtitan.conditions import Classes, Unconditional
from torchtitan.data.base import DataConfig, Dataset, DatasetInfo, UnreadableImage
from torchtitan.diffusion.denoising import DenoisingConfig
from torchtitan.diffusion.objectives import build_objective
from torchtitan.evaluation.optimal_draws import OptimalDraws, TrainingSet, optimal_draws
from torchtitan.settings import setting

CPU = torch.device("cpu")
SHAPE = (2, 3, 4)
COUNT = 64


@dataclass(kw_only=True)
class MemoryConfig(DataConfig):
    """`[data]` of these images."""

    name: Literal["memory"] = setting("memory", "dataset")
    horizontal_flip: bool = setting(False, "mirror")


class Memory(Dataset):
    """64 images in three classes, a third of them of one; near one another, so that noise of 0.1 confuses some."""

    Config = MemoryConfig

    def __init__(self, count: int = COUNT) -> None:
        generator = torch.Generator().manual_seed(3)
        self.images = 0.3 * torch.randn(count, *SHAPE, generator=generator)
        self.labels = torch.arange(count) % 3
        self.unreadable = ()

    def __len__(self):
        return len(self.images)

    def fetch(self, indices):
        if found := [index for index in indices if index in self.unreadable]:
            raise UnreadableImage(int(found[0]), "memory", "torn")
        chosen = torch.from_numpy(indices)
        return {"images": self.images[chosen], "class": self.labels[chosen]}


def training_set(flip: bool = False, classes: bool = True, count: int = COUNT) -> TrainingSet:
    kind = Classes(3) if classes else Unconditional()
    return TrainingSet(Memory(count), DatasetInfo(SHAPE, Classes(3)), MemoryConfig(horizontal_flip=flip), kind)


def draws_of(which: TrainingSet, folder: Path, objective=None, count=40, rank=0, world_size=1, times=()) -> OptimalDraws:
    return optimal_draws(
        which, objective or build_objective(DenoisingConfig(), seed=0), count=count, timesteps=times, rank=rank,
        world_size=world_size, device=CPU, folder=folder,
    )  # fmt: skip
