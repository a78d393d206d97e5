"""Class folders of images: their listing, numbers and names."""

import functools
import os

import numpy as np

from torchtitan.conditions import is_number
from torchtitan.data.base import DatasetError
from torchtitan.data.image_files import ImageList, found_instead, list_folders, list_images, shown_names, shown_path
from torchtitan.errors import look_alike
from torchtitan.files.regular import read_text, user_path


@functools.lru_cache(maxsize=4)  # a run opens the same folder several times, and may have a million files
def list_class_folders(key: str, path: str) -> tuple[list[bytes], ImageList]:
    """Class folders by name, and their images. Raises DatasetError: no such folder, no images, or an empty class."""
    root = existing_folder(key, path)
    folders = list_folders(root)
    files = list_images(root, folders)
    if not len(files):
        if len(list_images(root)):
            raise DatasetError(f"{key}: {path!r} has images, but not in folders, one per class")
        raise DatasetError(f"{key}: {path!r} has no images, neither here nor in folders{found_instead(root)}")
    counts = np.bincount(files.classes, minlength=len(folders))
    empty = [name for name, count in zip(folders, counts, strict=True) if not count]
    if empty:
        raise DatasetError(
            f"{key}: {len(empty)} of the {len(folders)} class folders have no images, first "
            f"{shown_path(os.path.join(root, empty[0]))} (fill or remove them)"
        )
    return folders, files


def existing_folder(key: str, path: str) -> bytes:
    """Resolve an existing folder's path for the file system. Raises DatasetError where it is no folder."""
    folder = user_path(path)
    if not folder.exists():
        raise missing_path(key, path)
    if not folder.is_dir():
        raise DatasetError(f"{key}: {path!r} is a file; give its folder")
    return os.fsencode(folder)


def missing_path(key: str, path: str) -> DatasetError:
    """Error of a path that does not exist, with the place where it was looked for if the path does not say it."""
    looked = os.path.abspath(user_path(path))
    return DatasetError(f"{key}: {path!r} does not exist" + ("" if looked == path.rstrip("/") else f" (looked for {looked})"))


def class_order(folders: list[bytes]) -> list[bytes]:
    """Class folders in the order of their classes: by number where all names are numbers, or else as given, by name."""
    return sorted(folders, key=lambda name: (int(name), name)) if all(map(is_number, shown_names(folders))) else folders


def class_numbers(folders: list[bytes], classes_file: str) -> np.ndarray:
    """Class numbers, int64, by `class_order` or a file's lines. Raises DatasetError: the file lacks one, or is bad."""
    order = read_classes(classes_file) if classes_file else shown_names(class_order(folders))
    known = {folder: number for number, folder in enumerate(order)}
    unknown = [folder for folder in shown_names(folders) if folder not in known]
    if unknown:
        spaces = " (a tab follows a folder with spaces)" if " " in unknown[0] else ""
        text = f"class folder {unknown[0]!r} is not in it{look_alike(unknown[0], known) or spaces}"
        raise DatasetError(f"data.classes_file: {classes_file}: {text}")
    return np.array([known[folder] for folder in shown_names(folders)])


def read_classes(path: str) -> dict[str, str]:
    """Read folder -> name, in the order of a file with one "folder name" a line, or "folder<tab>name". Raises DatasetError."""
    try:
        lines = read_text(user_path(path)).rstrip().splitlines()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "not a text file"
        raise DatasetError(f"data.classes_file: {path}: cannot be read: {reason}") from error

    names: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        folder, _, name = line.strip().partition("\t" if "\t" in line else " ")
        if not folder:
            raise DatasetError(f"data.classes_file: {path}: line {number} is empty")
        if folder in names:
            raise DatasetError(f"data.classes_file: {path}: line {number}: {folder!r} is listed twice")
        names[folder] = name.strip() or folder
    if not names:
        raise DatasetError(f"data.classes_file: {path}: has no classes")
    return names
