"""Tiny ImageNet: 200 classes, 64x64 colour, in the folders of tiny-imagenet-200."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from torchtitan.conditions import Classes
from torchtitan.data.base import DataConfig, DatasetError, DatasetInfo, Split
from torchtitan.data.image_files import ImageList, SquareImages, check_readable, list_images
from torchtitan.files.regular import read_text, user_path
from torchtitan.settings import setting

IMAGE_SIZE = 64
ANNOTATIONS = "val/val_annotations.txt"


@dataclass(kw_only=True)
class TinyImageNetConfig(DataConfig):
    """`[data]` with name = "tinyimagenet"."""

    name: Literal["tinyimagenet"] = setting("tinyimagenet", "dataset")
    path: str = setting("", "the folder tiny-imagenet-200", path=True)
    horizontal_flip: bool = setting(True, "mirror each training image with probability 1/2")
    max_corrupt_share: float = setting(
        0.2, "stop when more than this share of the images read cannot be decoded", ge=0, le=1, trajectory=False
    )


class TinyImageNet(SquareImages):
    """100,000 training and 10,000 validation images [3, 64, 64]; classes are numbered by sorted WordNet number."""

    Config = TinyImageNetConfig

    @staticmethod
    def info(config: TinyImageNetConfig) -> DatasetInfo:
        folder = _open_folder(config.path)
        wnids = _read_wnids(folder)
        check_readable(_list_train(folder, wnids), "data.path")
        check_readable(_list_validation(folder, wnids)[0], "data.path")
        return DatasetInfo((3, IMAGE_SIZE, IMAGE_SIZE), Classes(len(wnids), _class_names(folder, wnids)))

    def __init__(self, config: TinyImageNetConfig, split: Split) -> None:
        folder = _open_folder(config.path)
        wnids = _read_wnids(folder)
        if split == "train":
            files = _list_train(folder, wnids)
            labels = files.classes.astype(np.int64)
        else:
            files, labels = _list_validation(folder, wnids)
        super().__init__(files, np.arange(len(files)), labels, IMAGE_SIZE)


def _open_folder(path: str) -> Path:
    if not path:
        raise DatasetError("data.path: not given; tinyimagenet needs the folder tiny-imagenet-200")
    folder = user_path(path)
    for candidate in (folder, folder / "tiny-imagenet-200"):
        if (candidate / "wnids.txt").is_file():
            return candidate
    raise DatasetError(f"data.path: {path!r} " + ("has no wnids.txt" if folder.is_dir() else "is no folder"))


def _read_wnids(folder: Path) -> list[str]:
    wnids = sorted(set(_read_lines(folder / "wnids.txt")))
    if not wnids:
        raise DatasetError(f"{folder / 'wnids.txt'}: has no classes")
    return wnids


def _class_names(folder: Path, wnids: list[str]) -> tuple[str, ...]:
    """Class names: the first of each; words.txt names all of WordNet."""
    names = dict(line.partition("\t")[::2] for line in _read_lines(folder / "words.txt"))
    return tuple(names.get(wnid, wnid).split(",")[0].strip() for wnid in wnids)


def _list_train(folder: Path, wnids: list[str]) -> ImageList:
    there = [wnid for wnid in wnids if (folder / "train" / wnid / "images").is_dir()]
    files = list_images(os.fsencode(folder / "train"), [os.fsencode(f"{wnid}/images") for wnid in there])
    full = {there[number] for number in np.unique(files.classes)}
    if empty := [wnid for wnid in wnids if wnid not in full]:
        raise DatasetError(f"{folder}: train/{empty[0]}/images has no images")
    return files


def _list_validation(folder: Path, wnids: list[str]) -> tuple[ImageList, np.ndarray]:
    """List the held-out images in the order of the annotations, and their labels."""
    numbers = {wnid: number for number, wnid in enumerate(wnids)}
    names, labels = [], []
    for number, line in enumerate(_read_lines(folder / ANNOTATIONS), 1):
        name, wnid, *_ = (*line.split("\t"), "")
        if wnid not in numbers:
            raise DatasetError(f"{folder / ANNOTATIONS}: line {number}: class {wnid!r} is not in wnids.txt")
        names.append(os.fsencode(name))
        labels.append(numbers[wnid])
    if not names:
        raise DatasetError(f"{folder / ANNOTATIONS}: has no images")
    return ImageList.of(os.fsencode(folder / "val" / "images"), [names]), np.array(labels)


def _read_lines(path: Path) -> list[str]:
    try:
        return [line for line in read_text(path).splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not a text file"
        raise DatasetError(f"{path}: cannot be read: {reason}") from error
