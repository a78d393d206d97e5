"""Judges of generated images, by the name of their dataset; a new one is a file and a line here."""

from collections.abc import Mapping
from typing import ClassVar, Literal, Protocol, Self

import numpy as np

from torchtitan.data import DATASETS, DataConfig, Dataset
from torchtitan.evaluation.digits_judge import DigitsJudge


class Judge(Protocol):
    """Judge that compares generated images with real ones.

    Attributes:
        BETTER: direction in which each score that ranks generators improves.
    """

    BETTER: ClassVar[Mapping[str, Literal["lower", "higher"]]]

    @classmethod
    def from_dataset(cls, train: Dataset, validation: Dataset) -> Self:
        """Fit a judge to both splits of its dataset."""

    def judge(self, images: np.ndarray, labels: np.ndarray) -> dict[str, float]:
        """Judge images [N, C, H, W] in [-1, 1] that were requested as labels [N]: scores by name."""


JUDGES: dict[str, type[Judge]] = {"digits": DigitsJudge}


def judge_type(config: DataConfig) -> type[Judge] | None:
    """Type of the judge of a dataset, which compares by label; None if there is none, or labels or some classes are left aside.
    """
    return JUDGES.get(config.name) if config.labels and not config.classes else None


def build_judge(config: DataConfig) -> Judge:
    """Fit the judge of a dataset that has one to both of its splits."""
    dataset = DATASETS[config.name]
    return JUDGES[config.name].from_dataset(dataset(config, "train"), dataset(config, "validation"))
