"""Handwritten digits: the 1,797 grey 8x8 images that scikit-learn carries, so that nothing is downloaded."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from torchtitan.conditions import Classes
from torchtitan.data.base import Batch, DataConfig, Dataset, DatasetError, DatasetInfo, Split
from torchtitan.data.left_out import say_lacking
from torchtitan.extras import install
from torchtitan.settings import setting

NUM_TRAIN = 1500  # the other 297 are the validation split
SPLIT_KEY = 20240501


@dataclass(kw_only=True)
class DigitsConfig(DataConfig):
    """`[data]` with name = "digits"."""

    name: Literal["digits"] = setting("digits", "dataset")
    classes: list[int] = setting([], "digits to use, as [8, 9]; default: all; the network has ten classes either way")


class Digits(Dataset):
    """1,500 training and 297 validation images [1, 8, 8] of the digits 0 to 9, or those of some digits."""

    Config = DigitsConfig

    @staticmethod
    def info(config: DigitsConfig) -> DatasetInfo:
        if not _file().exists():
            raise DatasetError(f"dataset digits needs scikit-learn: {install('digits')}")
        if unknown := [digit for digit in config.classes if not 0 <= digit <= 9]:
            raise DatasetError(f"data.classes: {unknown[0]} is no digit (0 to 9)")
        if config.classes and config.labels:
            say_lacking("digits", 10 - len(set(config.classes)), 10)
        return DatasetInfo((1, 8, 8), Classes(10, tuple("0123456789")))

    def __init__(self, config: DigitsConfig, split: Split) -> None:
        rows = torch.from_numpy(_stored())
        # The order on file follows the writers; raw Philox words are the same in every version of NumPy.
        order = np.argsort(np.random.Philox(key=SPLIT_KEY).random_raw(len(rows)), kind="stable")
        chosen = rows[order[:NUM_TRAIN] if split == "train" else order[NUM_TRAIN:]]
        if config.classes:
            chosen = chosen[torch.isin(chosen[:, 64], torch.tensor(config.classes))]
        images = chosen[:, :64].to(torch.float32).view(-1, 1, 8, 8)  # values 0..16
        self._images = images / 8 - 1
        self._labels = chosen[:, 64].contiguous()

    def __len__(self) -> int:
        return len(self._labels)

    def fetch(self, indices: np.ndarray) -> Batch:
        chosen = torch.from_numpy(indices)
        return {"images": self._images[chosen], "class": self._labels[chosen]}


def _file() -> Path:
    package = importlib.util.find_spec("sklearn")
    if package is None or not package.submodule_search_locations:
        raise DatasetError(f"dataset digits needs scikit-learn: {install('digits')}")
    return Path(package.submodule_search_locations[0], "datasets", "data", "digits.csv.gz")


def _stored() -> np.ndarray:
    """Rows of 64 pixels and a class, [1797, 65], from the file of sklearn.datasets.load_digits without its slow import."""
    try:
        return np.loadtxt(_file(), dtype=np.int64, delimiter=",")
    except FileNotFoundError as error:
        raise DatasetError(f"dataset digits needs scikit-learn: {install('digits')}") from error

