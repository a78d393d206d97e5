"""Images in one folder per class, or in one folder without classes, of any size and format."""

import functools
import os
from dataclasses import dataclass
from typing import Literal

import numpy as np

from torchtitan.conditions import class_kind
from torchtitan.data.base import DatasetError, DatasetInfo, Split
from torchtitan.data.class_folders import class_numbers, class_order, existing_folder, list_class_folders, read_classes
from torchtitan.data.image_files import (
    ImageList,
    SquareImages,
    SquareImagesConfig,
    check_readable,
    found_instead,
    is_image_name,
    list_folders,
    list_images,
    shown_names,
    shown_path,
)
from torchtitan.data.left_out import say_once, say_untrained
from torchtitan.data.splits import chosen_positions, last_of_each_class
from torchtitan.errors import look_alike
from torchtitan.pictures.number_text import counted
from torchtitan.settings import setting

_SPLITS = {"train", "training", "val", "valid", "validation", "test"}


@dataclass(kw_only=True)
class ImageFolderConfig(SquareImagesConfig):
    """`[data]` with name = "image_folder"."""

    name: Literal["image_folder"] = setting("image_folder", "dataset")
    path: str = setting("", "folder of images, or of one folder of images per class", path=True)
    class_folders: bool | None = setting(
        None, "whether folders are classes; false trains without labels; default: true where there are folders, false where "
        "the images lie in data.path itself"
    )
    classes_file: str = setting(
        "", "text file, one 'folder name' a line in the order of class numbers; default: folders by name",
        applies={"class_folders": (True, None)}, path=True,
    )  # fmt: skip
    validation_path: str = setting("", "folder of held-out images, laid out like data.path", path=True)
    validation_fraction: float = setting(
        0.05, "share of data.path held out: the last images of each class", ge=0, lt=1,
        applies={"validation_path": ("",)},
    )  # fmt: skip


class ImageFolder(SquareImages):
    """Colour images [3, S, S]; a class's number is its folder's place in `class_order`, or its line in `classes_file`.

    Without `validation_path` the first k classes together give floor(fraction x their images) to validation, for
    every k, each class its last images by name: every class gives its share to within one image.
    """

    Config = ImageFolderConfig

    @staticmethod
    def info(config: ImageFolderConfig) -> DatasetInfo:
        size = config.required_size()
        folders, files = _list_folder("data.path", config.path, _has_classes(config))
        _check_classes(config, folders)
        check_readable(files, "data.path")
        held_out = last_of_each_class(files.classes, config.validation_fraction)
        has_validation = bool(held_out.any())
        if config.validation_path:
            _, held_out_files = _list_validation(config, folders)
            check_readable(held_out_files, "data.validation_path")
            has_validation = True
        names = _class_names(config, folders) if config.labels else ()
        if names:
            say_untrained(shown_path(files.folder), files.classes, held_out & (not config.validation_path), len(names))
        if len(names) > 1 and set(names) <= _SPLITS:
            advice = "give the folder of training images, and another as data.validation_path"
            say_once(f"{shown_path(files.folder)}: its classes are {', '.join(names)} ({advice}, if they are splits)")
        return DatasetInfo((3, size, size), class_kind(len(names), names), has_validation)

    def __init__(self, config: ImageFolderConfig, split: Split) -> None:
        folders, files = _list_folder("data.path", config.path, _has_classes(config))
        numbers = _class_numbers(config, folders)
        chosen = np.ones(len(files), bool)
        if config.validation_path and split == "validation":
            folders_here, files = _list_validation(config, folders)
            number_of = dict(zip(folders, numbers, strict=False))  # without classes there is one number, and no folder
            numbers = np.array([number_of.get(folder, 0) for folder in folders_here] or [0])
            chosen = np.ones(len(files), bool)
        elif not config.validation_path:
            held_out = last_of_each_class(files.classes, config.validation_fraction)
            chosen = held_out if split == "validation" else ~held_out
        positions = chosen_positions(chosen, split, config.validation_fraction)
        labels = numbers[files.classes[positions]]
        labelled = config.labels and _has_classes(config)
        super().__init__(files, positions, labels, config.required_size(), labelled=labelled)


def _has_classes(config: ImageFolderConfig) -> bool:
    """Whether folders are classes. Raises DatasetError: there are images beside folders, and the key is not given."""
    if config.class_folders is not None or not config.path:
        return config.class_folders is not False
    return _looks_classed("data.path", config.path, config.labels)


@functools.lru_cache(maxsize=4)
def _looks_classed(key: str, path: str, labels: bool) -> bool:
    root = existing_folder(key, path)
    folders, loose = list_folders(root), len(_loose_images(root))
    if folders and loose and labels:
        ways = "true to train on the folders as classes, or false" if len(folders) > 1 else "false"
        raise DatasetError(
            f"{key}: {path!r} has {counted(loose, 'image')} beside {counted(len(folders), 'folder')} (set"
            f" data.class_folders = {ways} to train on all images without labels)"
        )
    return not loose


def _loose_images(root: bytes) -> list[bytes]:
    """Names of the images that lie in a folder itself."""
    folders = set(list_folders(root))
    with os.scandir(root) as entries:
        names = [entry.name for entry in entries if not entry.name.startswith(b".") and entry.name not in folders]
    return [*filter(is_image_name, names)]


def _list_folder(key: str, path: str, class_folders: bool) -> tuple[list[bytes], ImageList]:
    """List class folders by name (none without classes) and the images in them."""
    if not path:
        raise DatasetError(f"{key}: not given; image_folder needs a folder of images")
    return list_class_folders(key, path) if class_folders else ([], _list_unlabelled(key, path))


@functools.lru_cache(maxsize=4)
def _list_unlabelled(key: str, path: str) -> ImageList:
    root = existing_folder(key, path)
    files = list_images(root)
    if not len(files):
        raise DatasetError(f"{key}: {path!r} has no images in it{found_instead(root)}")
    return files


def _list_validation(config: ImageFolderConfig, folders: list[bytes]) -> tuple[list[bytes], ImageList]:
    key, path, classed = "data.validation_path", config.validation_path, _has_classes(config)
    if config.class_folders is None and not config.labels:
        classed = _looks_classed(key, path, False)  # which without labels need not be alike
    found, files = _list_folder(key, path, classed)
    if classed and (count := len(_loose_images(existing_folder(key, path)))):
        say_once(f"{path}: leaving out {counted(count, 'image')} beside its folders")
    unknown = sorted(set(found) - set(folders))
    if unknown and config.labels:
        name = shown_path(unknown[0])
        alike = look_alike(name, shown_names(folders))
        raise DatasetError(f"data.validation_path: class folder {name!r} is not in {config.path!r}{alike}")
    return found, files


def _check_classes(config: ImageFolderConfig, folders: list[bytes]) -> None:
    if not (_has_classes(config) and config.labels):
        return
    if len(folders) == 1:
        raise DatasetError(
            f"data.path: {config.path!r} has one class folder only, {shown_path(folders[0])!r} (give the folder with one "
            "folder for each class, or set data.class_folders = false to train without labels)"
        )
    class_numbers(folders, config.classes_file)


def _class_numbers(config: ImageFolderConfig, folders: list[bytes]) -> np.ndarray:
    """Class number of each class folder, int64."""
    labelled = config.labels and _has_classes(config)
    return class_numbers(folders, config.classes_file) if labelled else np.zeros(max(len(folders), 1), np.int64)


def _class_names(config: ImageFolderConfig, folders: list[bytes]) -> tuple[str, ...]:
    if not _has_classes(config) or not config.classes_file:
        return shown_names(class_order(folders))
    return tuple(read_classes(config.classes_file).values())
