"""ImageNet (ILSVRC-2012) as distributed: class folders, Kaggle's tree, or the original tar archives in place."""

import functools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from torchtitan.conditions import Classes
from torchtitan.data.base import DatasetError, DatasetInfo, Split
from torchtitan.data.class_folders import class_numbers, existing_folder, list_class_folders, read_classes
from torchtitan.data.image_files import (
    ImageList,
    ImageSource,
    PackedNames,
    SquareImages,
    SquareImagesConfig,
    check_readable,
    is_image_name,
    list_folders,
    list_images,
    shown_names,
)
from torchtitan.data.imagenet_metadata import WNID, find_class_names, find_validation_wnids
from torchtitan.data.left_out import say_once, say_untrained
from torchtitan.data.splits import chosen_positions, last_of_each_class
from torchtitan.data.tar_files import Member, OpenArchives, TarImages, read_members
from torchtitan.files.regular import user_path
from torchtitan.pictures.number_text import counted
from torchtitan.settings import setting

TRAIN_ARCHIVE = "ILSVRC2012_img_train.tar"
VALIDATION_ARCHIVE = "ILSVRC2012_img_val.tar"
KAGGLE_IMAGES = "ILSVRC/Data/CLS-LOC"


@dataclass(kw_only=True)
class ImageNetConfig(SquareImagesConfig):
    """`[data]` with name = "imagenet"."""

    name: Literal["imagenet"] = setting("imagenet", "dataset")
    path: str = setting(
        "", "folder with train/ and val/, Kaggle's folder, or the folder of the original tar archives", path=True
    )
    classes_file: str = setting(
        "", "text file, one 'wnid name' a line in the order of class numbers; default: the training wnids, sorted",
        path=True,
    )
    validation_fraction: float | None = setting(
        None, "share of the training images held out, the last of each class; only without val; default: 0.05",
        ge=0, lt=1,
    )  # fmt: skip


@dataclass(frozen=True)
class _Part:
    """Images of a part of ImageNet; wnids: those with images, sorted; classes: each image's number there, int32 [N]."""

    wnids: list[bytes]
    source: ImageSource
    classes: np.ndarray


class ImageNet(SquareImages):
    """Colour images [3, S, S]; a class's number is its wnid's place among the sorted ones, or in `classes_file`.

    `val` is the validation split; images there of classes that the training data lacks are left out. Where there is
    no `val`, every class gives the last of its training images, as in image_folder.
    """

    Config = ImageNetConfig

    @staticmethod
    def info(config: ImageNetConfig) -> DatasetInfo:
        size = config.required_size()
        train, held_out = _open(config.path)
        class_numbers(train.wnids, config.classes_file)
        check_readable(train.source, "data.path")
        if held_out:
            check_readable(held_out.source, "data.path")
            if config.validation_fraction is not None:
                raise DatasetError("data.validation_fraction: val holds held-out images already; leave the key out")
            elsewhere = np.array([wnid not in train.wnids for wnid in held_out.wnids])
            if lacking := int(elsewhere[held_out.classes].sum()):
                classes = counted(int(elsewhere.sum()), "class", "es")
                say_once(f"{config.path}: {counted(lacking, 'image')} of val left out: train has none of their {classes}")
        last = last_of_each_class(train.classes, _fraction(config))
        names = _class_names(config, train.wnids)
        if config.labels:
            say_untrained(config.path, train.classes, last & (not held_out), len(names))
        has_validation = bool(held_out or last.any())
        return DatasetInfo((3, size, size), Classes(len(names), names), has_validation)

    def __init__(self, config: ImageNetConfig, split: Split) -> None:
        train, held_out = _open(config.path)
        numbers = class_numbers(train.wnids, config.classes_file)
        if held_out and split == "validation":
            number_of = dict(zip(train.wnids, numbers, strict=True))
            labels = np.array([number_of.get(wnid, -1) for wnid in held_out.wnids])[held_out.classes]
            part, positions = held_out, np.flatnonzero(labels >= 0)
            labels = labels[positions]
        else:
            fraction = 0.0 if held_out else _fraction(config)
            last = last_of_each_class(train.classes, fraction)
            part, positions = train, chosen_positions(last if split == "validation" else ~last, split, fraction)
            labels = numbers[train.classes[positions]]
        super().__init__(part.source, positions, labels, config.required_size())


def _fraction(config: ImageNetConfig) -> float:
    return 0.05 if config.validation_fraction is None else config.validation_fraction


def _class_names(config: ImageNetConfig, wnids: list[bytes]) -> tuple[str, ...]:
    if config.classes_file:
        return tuple(read_classes(config.classes_file).values())
    names = find_class_names(_roots(config.path))
    return tuple(names.get(wnid, wnid) for wnid in shown_names(wnids))


@functools.lru_cache(maxsize=2)  # a run opens the same folder several times
def _open(path: str) -> tuple[_Part, _Part | None]:
    """Open the training images, and the held-out ones if there are any. Raises DatasetError."""
    if not path:
        raise DatasetError("data.path: not given; imagenet needs the folder with train/ and val/, or with the archives")
    existing_folder("data.path", path)
    roots = _roots(path)
    train = _open_train(roots)
    held_out = _open_validation(roots)
    if held_out and not set(held_out.wnids) & set(train.wnids):
        raise DatasetError(f"data.path: {path!r}: no image of val is of a class that train has")
    return train, held_out


def _roots(path: str) -> list[Path]:
    folder = user_path(path)
    inside = list(folder.absolute().parents)[2:3] if folder.name == Path(KAGGLE_IMAGES).name else []
    return [folder, folder / KAGGLE_IMAGES, *inside]


def _open_train(roots: list[Path]) -> _Part:
    for root in roots[:2]:
        if (root / "train").is_dir():
            wnids, files = list_class_folders("data.path", str(root / "train"))
            return _checked(root / "train", _Part(wnids, files, files.classes))
        if (root / TRAIN_ARCHIVE).is_file():
            images = _open_archive(root / TRAIN_ARCHIVE)
            wnids = [os.path.dirname(name).removesuffix(b".tar") for name in _names(images)]
            return _checked(root / TRAIN_ARCHIVE, _by_wnid(images, wnids))
    raise DatasetError(
        f"data.path: {str(roots[0])!r} has neither train/ nor {TRAIN_ARCHIVE} (data.name = \"image_folder\" reads any "
        "folder of class folders)"
    )


def _checked(place: Path, part: _Part) -> _Part:
    strange = [name for name in shown_names(part.wnids) if not WNID.fullmatch(name)]
    if strange:
        raise DatasetError(f"data.path: {place}: its class {strange[0]!r} is no wnid (n and 8 digits)")
    return part


def _open_validation(roots: list[Path]) -> _Part | None:
    for root in roots[:2]:
        folder = root / "val"
        if folder.is_dir() and list_folders(os.fsencode(folder)):
            wnids, files = list_class_folders("data.path", str(folder))
            return _Part(wnids, files, files.classes)
        if folder.is_dir() and len(files := list_images(os.fsencode(folder))):
            return _by_wnid(files, _wnids_of(_names(files), roots))
        if (root / VALIDATION_ARCHIVE).is_file():
            images = _open_archive(root / VALIDATION_ARCHIVE)
            return _by_wnid(images, _wnids_of(_names(images), roots))
        if folder.is_dir():
            raise DatasetError(f"data.path: {folder} has no images in it (fill it, or remove it to hold out some of train)")
    return None


def _names(images: TarImages | ImageList) -> list[bytes]:
    return [images.names[position] for position in range(len(images))]


def _by_wnid(source: ImageSource, wnid_of_each: list[bytes]) -> _Part:
    wnids, classes = np.unique(np.array(wnid_of_each), return_inverse=True)
    return _Part(wnids.tolist(), source, classes.astype(np.int32))


def _wnids_of(names: list[bytes], roots: list[Path]) -> list[bytes]:
    known = {os.fsencode(name): os.fsencode(wnid) for name, wnid in find_validation_wnids(roots).items()}
    stems = [os.path.basename(name).partition(b".")[0] for name in names]
    unknown = [name for name, stem in zip(names, stems, strict=True) if stem not in known]
    if unknown:
        raise DatasetError(
            f"data.path: {len(unknown)} held-out images are in no list of classes, first {shown_names(unknown)[0]}"
        )
    return [known[stem] for stem in stems]


def _open_archive(path: Path) -> TarImages:
    """Open the images of an archive, by class and name, like a listing of folders."""

    def place(member: Member) -> tuple[bytes, bytes]:
        archive, _, name = member.name.rpartition(b".tar/")
        return archive, name

    found = sorted((member for member in read_members(path, nested=True) if _is_shown(member)), key=place)
    if not found:
        raise DatasetError(f"{path}: has no images in it")
    return TarImages(
        OpenArchives([path]), np.zeros(len(found), np.int32), np.array([member.offset for member in found], np.int64),
        np.array([member.size for member in found], np.int64), PackedNames.of([member.name for member in found]),
    )  # fmt: skip


def _is_shown(member: Member) -> bool:
    return is_image_name(member.name) and not os.path.basename(member.name).startswith(b".")
