"""Datasets by name. To add one: write data/<name>.py after the contract in data/base.py, and one line here."""

from data.base import DataConfig, Dataset, DatasetError, DatasetInfo, Split
from data.cifar10 import Cifar10
from data.digits import Digits
from data.synthetic import Synthetic

DATASETS: dict[str, type] = {
    "digits": Digits,
    "cifar10": Cifar10,
    "synthetic": Synthetic,
}

__all__ = ["DATASETS", "DataConfig", "Dataset", "DatasetError", "DatasetInfo", "Split"]
