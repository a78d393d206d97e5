"""Images in one folder per class, of any size and format, such as ImageNet's training set."""

import functools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from data.base import DataConfig, DatasetError, DatasetInfo, Split
from data.image_files import (
    ImageList,
    SquareImages,
    check_readable,
    list_folders,
    list_images,
    shown_names,
    shown_path,
)
from torchtitan.settings import setting


@dataclass(kw_only=True)
class ImageFolderConfig(DataConfig):
    """`[data]` with name = "image_folder"."""

    name: Literal["image_folder"] = setting("image_folder", "dataset")
    path: str = setting("", "folder that holds one folder of images per class")
    image_size: int | None = setting(None, "pixels of each side of the squares that images are cut to", ge=1)
    class_folders: bool = setting(True, "whether folders are classes; false trains without labels")
    classes_file: str = setting(
        "", "text file, one 'folder name' a line in the order of class numbers; default: folders by name",
        applies={"class_folders": (True,)},
    )  # fmt: skip
    validation_path: str = setting("", "folder of held-out images, laid out like data.path")
    validation_fraction: float = setting(
        0.05, "share of data.path held out: the last images of each class", ge=0, lt=1,
        applies={"validation_path": ("",)},
    )  # fmt: skip
    horizontal_flip: bool = setting(True, "mirror each training image with probability 1/2")
    max_corrupt_share: float = setting(
        0.2, "stop when more than this share of the images read cannot be decoded", ge=0, le=1, trajectory=False
    )


class ImageFolder(SquareImages):
    """Colour images [3, S, S]; a class's number is its folder's place by name, or its line in `classes_file`.

    Without `validation_path` the first k classes together give floor(fraction x their images) to validation, for
    every k, each class its last images by name: every class gives its share to within one image.
    """

    Config = ImageFolderConfig

    @staticmethod
    def info(config: ImageFolderConfig) -> DatasetInfo:
        if config.image_size is None:
            raise DatasetError("data.image_size: not given; image_folder needs the side of its square images in pixels")
        folders, files = _list_folder("data.path", config.path, config.class_folders)
        _check_classes(config, folders)
        check_readable(files, "data.path")
        has_validation = bool(_held_out(files, config.validation_fraction).any())
        if config.validation_path:
            _, held_out_files = _list_validation(config, folders)
            check_readable(held_out_files, "data.validation_path")
            has_validation = True
        names = _class_names(config, folders)
        return DatasetInfo(
            image_shape=(3, config.image_size, config.image_size),
            num_classes=len(names),
            class_names=names,
            has_validation=has_validation,
        )

    def __init__(self, config: ImageFolderConfig, split: Split) -> None:
        folders, files = _list_folder("data.path", config.path, config.class_folders)
        numbers = _class_numbers(config, folders)
        chosen = np.ones(len(files), bool)
        if config.validation_path and split == "validation":
            folders_here, files = _list_validation(config, folders)
            number_of = dict(zip(folders, numbers, strict=True))
            numbers = np.array([number_of[folder] for folder in folders_here] or [0])
            chosen = np.ones(len(files), bool)
        elif not config.validation_path:
            held_out = _held_out(files, config.validation_fraction)
            chosen = held_out if split == "validation" else ~held_out
        positions = np.flatnonzero(chosen)
        if len(positions) == 0:
            raise DatasetError(f"data.validation_fraction: {config.validation_fraction} leaves no image for {split}")
        super().__init__(files, positions, numbers[files.classes[positions]], config.image_size)


@functools.lru_cache(maxsize=4)  # a run opens the same folder several times, and may have a million files
def _list_folder(key: str, path: str, class_folders: bool) -> tuple[list[bytes], ImageList]:
    """Class folders by name (none without classes) and the images in them."""
    if not path:
        raise DatasetError(f"{key}: not given; image_folder needs a folder of images")
    folder = Path(path).expanduser()
    if not folder.exists():
        raise DatasetError(f"{key}: {path!r} does not exist")
    if not folder.is_dir():
        raise DatasetError(f"{key}: {path!r} is a file; give its folder")
    root = os.fsencode(folder)
    if not class_folders:
        names = list_images(root)
        if not names:
            raise DatasetError(f"{key}: {path!r} has no images in it")
        return [], ImageList.of(root, [names])
    folders = list_folders(root)
    names_by_class = [list_images(os.path.join(root, name), name + b"/") for name in folders]
    if not any(names_by_class):
        where = "has images, but not in" if not folders and list_images(root) else "has no images in"
        raise DatasetError(f"{key}: {path!r} {where} folders, one per class")
    empty = [name for name, names in zip(folders, names_by_class, strict=True) if not names]
    if empty:
        raise DatasetError(
            f"{key}: {len(empty)} of the {len(folders)} class folders have no images, first "
            f"{shown_path(os.path.join(root, empty[0]))} (fill or remove them)"
        )
    return folders, ImageList.of(root, names_by_class)


def _list_validation(config: ImageFolderConfig, folders: list[bytes]) -> tuple[list[bytes], ImageList]:
    found, files = _list_folder("data.validation_path", config.validation_path, config.class_folders)
    unknown = sorted(set(found) - set(folders))
    if unknown:
        raise DatasetError(f"data.validation_path: class folder {shown_path(unknown[0])!r} is not in {config.path!r}")
    return found, files


def _held_out(files: ImageList, fraction: float) -> np.ndarray:
    """Which files belong to validation, bool [N]."""
    ends = np.searchsorted(files.classes, np.arange(files.classes[-1] + 1), side="right")
    starts = np.concatenate(([0], ends[:-1]))
    given = np.floor(ends * fraction + 1e-9).astype(np.int64)  # a product may end just below a whole number
    counts = np.diff(given, prepend=0)
    first_held_out = np.maximum(ends - counts, starts)
    return np.arange(len(files)) >= first_held_out[files.classes]


def _check_classes(config: ImageFolderConfig, folders: list[bytes]) -> None:
    if not config.class_folders:
        return
    if len(folders) == 1:
        raise DatasetError(
            f"data.path: {config.path!r} has one class folder only, {shown_path(folders[0])!r} (give the folder whose "
            "folders are the classes, or set data.class_folders = false to train without labels)"
        )
    _class_numbers(config, folders)


def _class_numbers(config: ImageFolderConfig, folders: list[bytes]) -> np.ndarray:
    """The label of each class folder, int64."""
    if not config.class_folders:
        return np.zeros(1, np.int64)
    if not config.classes_file:
        return np.arange(len(folders))
    known = {folder: number for number, folder in enumerate(_read_classes(config.classes_file))}
    unknown = [folder for folder in shown_names(folders) if folder not in known]
    if unknown:
        raise DatasetError(f"data.classes_file: {config.classes_file}: class folder {unknown[0]!r} is not in it")
    return np.array([known[folder] for folder in shown_names(folders)])


def _class_names(config: ImageFolderConfig, folders: list[bytes]) -> tuple[str, ...]:
    if not config.class_folders or not config.classes_file:
        return shown_names(folders)
    return tuple(_read_classes(config.classes_file).values())


def _read_classes(path: str) -> dict[str, str]:
    """Folder -> name, in the order of the file."""
    try:
        lines = Path(path).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not a text file"
        raise DatasetError(f"data.classes_file: {path}: cannot be read: {reason}") from error
    names: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        folder, _, name = line.strip().partition(" ")
        if not folder:
            raise DatasetError(f"data.classes_file: {path}: line {number} is empty")
        if folder in names:
            raise DatasetError(f"data.classes_file: {path}: line {number}: {folder!r} is listed twice")
        names[folder] = name.strip() or folder
    return names
