"""Datasets by name. To add one: write data/<name>.py after the contract in base.py, and one line here."""

import dataclasses
import os
import re
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
_OF_FOLDERS = ("captioned_folder", "image_folder")


def dataset_info(config: DataConfig) -> DatasetInfo:
    """Describe the dataset of a section without reading its images, without labels if the section leaves them aside.

    Raises:
        DatasetError: it is missing, empty or damaged.
    """
    if config.name in _OF_FOLDERS and config.path and config.validation_path:
        _check_apart(config.path, config.validation_path)
    info = DATASETS[config.name].info(config)
    if config.labels:
        return info
    entries = info.condition_kind.batch_entries | info.entries  # which still come, and condition nothing
    return dataclasses.replace(info, condition_kind=Unconditional(), entries=entries)


def _check_apart(path: str, held_out: str) -> None:
    """Raise DatasetError if the folder of held-out images is that of training, or one is listed with the other."""
    for place in (os.path.realpath, os.path.abspath):
        trained, other = (place(os.path.expanduser(each)) for each in (path, held_out))
        below = [os.path.relpath(other, trained), os.path.relpath(trained, other)]
        # Names with a dot are not read; a path that leads outside begins with two.
        if below[0] == "." or any(not re.search(r"(^|/)\.", each) for each in below):
            advice = "give it a folder apart, or leave the key out, which holds out data.validation_fraction"
            text = f"{held_out} and data.path have images in common, which would be trained on"
            raise DatasetError(f"data.validation_path: {text} ({advice})")


__all__ = [
    "DATASETS", "LATENT_DATASETS", "DataConfig", "Dataset", "DatasetError", "DatasetInfo", "Draws", "Split",
    "UnreadableImage", "dataset_info",
]  # fmt: skip
