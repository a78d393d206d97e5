"""Datasets by name. To add one: write data/<name>.py after the contract in base.py, and one line here."""

import dataclasses
import os
from typing import Any

from torchtitan.conditions import Unconditional
from torchtitan.data.base import DataConfig, Dataset, DatasetError, DatasetInfo, Draws, Split, UnreadableImage
from torchtitan.settings import Registry

# Each follows the contract of Dataset, and has its own Config.
DATASETS: Registry[type[Any]] = Registry("torchtitan.data", {
    "digits": "digits.Digits",
    "captioned_folder": "captioned_folder.CaptionedFolder",
    "cifar10": "cifar.Cifar10",
    "cifar100": "cifar.Cifar100",
    "huggingface": "huggingface.HuggingFace",
    "image_folder": "image_folder.ImageFolder",
    "imagenet": "imagenet.ImageNet",
    "latents": "latents.Latents",
    "synthetic": "synthetic.Synthetic",
    "tinyimagenet": "tinyimagenet.TinyImageNet",
    "webdataset": "webdataset.WebDataset",
}, type[Dataset])
# Datasets of latents: their `store` opens the latent store.
LATENT_DATASETS = ("latents",)
_LISTED_IN_DEPTH = ("captioned_folder", "image_folder")


def dataset_info(config: DataConfig) -> DatasetInfo:
    """Describe the dataset of a section without reading its images, without labels if the section leaves them aside.

    Raises:
        DatasetError: it is missing, empty or damaged.
    """
    if held_out := getattr(config, "validation_path", ""):
        path, inside = (os.path.realpath(os.path.expanduser(each)) for each in (getattr(config, "path", ""), held_out))
        if inside == path or (config.name in _LISTED_IN_DEPTH and inside.startswith(f"{path}/")):
            advice = "move it out, or leave the key out, which holds out data.validation_fraction"
            raise DatasetError(f"data.validation_path: {held_out} is in data.path, whose images are trained on ({advice})")
    info = DATASETS[config.name].info(config)
    if config.labels:
        return info
    entries = info.condition_kind.batch_entries | info.entries  # which still come, and condition nothing
    return dataclasses.replace(info, condition_kind=Unconditional(), entries=entries)


__all__ = [
    "DATASETS", "LATENT_DATASETS", "DataConfig", "Dataset", "DatasetError", "DatasetInfo", "Draws", "Split",
    "UnreadableImage", "dataset_info",
]  # fmt: skip
