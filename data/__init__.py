"""Datasets by name. To add one: write data/<name>.py after the contract in base.py, and one line here."""

import dataclasses
from typing import Any

from torchtitan.conditions import Unconditional
from torchtitan.data.base import DataConfig, Dataset, DatasetError, DatasetInfo, Draws, Split, UnreadableImage
from torchtitan.data.captioned_folder import CaptionedFolder
from torchtitan.data.cifar import Cifar10, Cifar100
from torchtitan.data.digits import Digits
from torchtitan.data.huggingface import HuggingFace
from torchtitan.data.image_folder import ImageFolder
from torchtitan.data.imagenet import ImageNet
from torchtitan.data.latents import Latents
from torchtitan.data.synthetic import Synthetic
from torchtitan.data.tinyimagenet import TinyImageNet
from torchtitan.data.webdataset import WebDataset

# Each follows the contract of Dataset, and has its own Config.
DATASETS: dict[str, type[Any]] = {
    "digits": Digits,
    "captioned_folder": CaptionedFolder,
    "cifar10": Cifar10,
    "cifar100": Cifar100,
    "huggingface": HuggingFace,
    "image_folder": ImageFolder,
    "imagenet": ImageNet,
    "latents": Latents,
    "synthetic": Synthetic,
    "tinyimagenet": TinyImageNet,
    "webdataset": WebDataset,
}


def dataset_info(config: DataConfig) -> DatasetInfo:
    """Describe the dataset of a section without reading its images, without labels if the section leaves them aside.

    Raises:
        DatasetError: it is missing, empty or damaged.
    """
    info = DATASETS[config.name].info(config)
    return info if config.labels else dataclasses.replace(info, condition_kind=Unconditional())


__all__ = [
    "DATASETS", "DataConfig", "Dataset", "DatasetError", "DatasetInfo", "Draws", "Split", "UnreadableImage", "dataset_info",
]  # fmt: skip
