"""Judges of generated images, by the name of their dataset; a new one is a file and a line here."""

from collections.abc import Callable
from typing import Protocol

import numpy as np

from data import DATASETS, DataConfig, Dataset
from torchtitan.evaluation.digits_judge import DigitsJudge


class Judge(Protocol):
    """Judge that compares generated images with real ones."""

    def judge(self, images: np.ndarray, labels: np.ndarray) -> dict[str, float]:
        """Judge images [N, C, H, W] in [-1, 1] that were requested as labels [N]: scores by name."""


JUDGES: dict[str, Callable[[Dataset, Dataset], Judge]] = {"digits": DigitsJudge.from_dataset}


def build_judge(config: DataConfig) -> Judge:
    """Fit the judge of a dataset, one of JUDGES, to both of its splits."""
    dataset = DATASETS[config.name]
    return JUDGES[config.name](dataset(config, "train"), dataset(config, "validation"))
