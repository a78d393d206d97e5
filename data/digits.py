"""Handwritten digits: the 1,797 grey 8x8 images that scikit-learn carries, so that nothing is downloaded."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from data.base import Batch, DataConfig, Dataset, DatasetError, DatasetInfo, Split
from torchtitan.conditions import Classes
from torchtitan.settings import setting

NUM_TRAIN = 1500  # the other 297 are the validation split
SPLIT_KEY = 20240501


@dataclass(kw_only=True)
class DigitsConfig(DataConfig):
    """`[data]` with name = "digits"."""

    name: Literal["digits"] = setting("digits", "dataset")


class Digits(Dataset):
    """1,500 training and 297 validation images [1, 8, 8] of the digits 0 to 9."""

    Config = DigitsConfig

    @staticmethod
    def info(config: DigitsConfig) -> DatasetInfo:
        if importlib.util.find_spec("sklearn") is None:
            raise DatasetError(_MISSING)
        return DatasetInfo((1, 8, 8), Classes(10, tuple("0123456789")))

    def __init__(self, config: DigitsConfig, split: Split) -> None:
        try:
            from sklearn.datasets import load_digits
        except ImportError as error:
            raise DatasetError(_MISSING) from error
        stored = load_digits()
        # The order on file follows the writers; raw Philox words are the same in every version of NumPy.
        order = np.argsort(np.random.Philox(key=SPLIT_KEY).random_raw(len(stored.target)), kind="stable")
        chosen = order[:NUM_TRAIN] if split == "train" else order[NUM_TRAIN:]
        images = torch.from_numpy(stored.images[chosen]).to(torch.float32)  # [N, 8, 8], values 0..16
        self._images = (images / 8 - 1)[:, None]  # [N, 1, 8, 8]
        self._labels = torch.from_numpy(stored.target[chosen]).to(torch.int64)

    def __len__(self) -> int:
        return len(self._labels)

    def fetch(self, indices: np.ndarray) -> Batch:
        chosen = torch.from_numpy(indices)
        return {"images": self._images[chosen], "class": self._labels[chosen]}


_MISSING = "dataset digits needs scikit-learn: pip install .[digits]"
