"""A dataset: white discs on black, drawn when they are read; the class is the number of discs.

    train.py digits --job.name discs --job.plugins examples/discs.py --data.name discs --evaluation.enable false
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from torchtitan.conditions import class_kind
from torchtitan.data import DATASETS
from torchtitan.data.base import Batch, DataConfig, Dataset, DatasetError, DatasetInfo, Split
from torchtitan.settings import setting

HELD_OUT = 1000  # images for validation, after those of training


@dataclass(kw_only=True)
class DiscsConfig(DataConfig):
    name: Literal["discs"] = setting("discs", "dataset")
    image_size: int = setting(16, "pixels of each side", ge=8)
    num_images: int = setting(10_000, "training images", ge=1)
    most: int = setting(3, "largest number of discs in an image", ge=1)


class Discs(Dataset):
    Config = DiscsConfig

    @staticmethod
    def info(config: DiscsConfig) -> DatasetInfo:
        """Describe the images without drawing any: what is wrong is refused here, before anything is built."""
        if config.image_size % 2:
            raise DatasetError(f"data.image_size: {config.image_size} is odd (give an even number)")
        names = tuple(f"{number} discs" for number in range(1, config.most + 1))
        return DatasetInfo((1, config.image_size, config.image_size), class_kind(config.most, names))

    def __init__(self, config: DiscsConfig, split: Split) -> None:
        self.config = config
        self.first, self.length = (0, config.num_images) if split == "train" else (config.num_images, HELD_OUT)

    def __len__(self) -> int:
        return self.length

    def fetch(self, indices: np.ndarray) -> Batch:
        """Draw images: the same index is the same image in every process, or layouts and resumes would differ."""
        numbers = indices + self.first
        images = np.stack([self.image(int(number)) for number in numbers])
        return {"images": torch.from_numpy(images), "class": torch.from_numpy(numbers % self.config.most)}

    def image(self, number: int) -> np.ndarray:
        size, random = self.config.image_size, np.random.default_rng(number)
        y, x = np.mgrid[:size, :size]
        image = np.full((1, size, size), -1.0, dtype=np.float32)
        for _ in range(number % self.config.most + 1):
            center_y, center_x = random.uniform(0.2 * size, 0.8 * size, 2)
            image[0, (y - center_y) ** 2 + (x - center_x) ** 2 < (0.15 * size) ** 2] = 1.0
        return image


DATASETS["discs"] = Discs
