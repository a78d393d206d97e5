"""Listings of folders of images that are saved: the same as new ones, old as soon as a name comes or goes."""

import os
import time
from pathlib import Path

import numpy as np
import pytest

from tests.launcher import run_on_ranks
from torchtitan.data import saved_listing
from torchtitan.data.class_folders import list_class_folders
from torchtitan.data.image_files import ImageList, list_images
from torchtitan.data.saved_listing import list_images_of_folders

FOLDERS = [b"cat", b"d\xf6g", b"eel"]
LONG_AGO = time.time() - 1000


def make_images(root: Path) -> None:
    for number, folder in enumerate(FOLDERS):
        for name in ("2.png", "10.jpg", "deep/er/1.webp", "notes.txt", ".hidden.png"):
            path = root / os.fsdecode(folder) / (f"{number}-{name}" if name[0].isdigit() else name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"")
    settle(root)


def settle(root: Path) -> None:
    """Let the last change of every folder be long ago, each at another time."""
    for number, (folder, _, _) in enumerate(os.walk(root)):
        os.utime(folder, (LONG_AGO + number, LONG_AGO + number))


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setattr(saved_listing.tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    make_images(tmp_path / "images")
    return tmp_path / "images"


def scans(monkeypatch) -> list[bytes]:
    """Folders that are scanned from now on."""
    original, folders = saved_listing.list_files, []

    def call(folder, *given):
        folders.append(folder)
        return original(folder, *given)

    monkeypatch.setattr(saved_listing, "list_files", call)
    return folders


def names_of(files: ImageList) -> list[bytes]:
    return [files.names[position] for position in range(len(files))]


def wanted(root: Path) -> ImageList:
    folder = os.fsencode(root)
    return ImageList.of(folder, [list_images(os.path.join(folder, name), name + b"/") for name in FOLDERS])


def assert_same(files: ImageList, other: ImageList) -> None:
    assert names_of(files) == names_of(other) and np.array_equal(files.classes, other.classes)
    assert files.classes.dtype == np.int32 and files.folder == other.folder


def test_a_listing_is_made_once_and_is_the_same_as_a_new_one(root, monkeypatch):
    scanned, expected = scans(monkeypatch), wanted(root)
    for _ in range(3):
        assert_same(list_images_of_folders(os.fsencode(root), FOLDERS), expected)
    assert len(scanned) == len(FOLDERS) and len(expected) == 9
    flat = list_images_of_folders(os.fsencode(root), [b""])
    assert names_of(flat) == list_images(os.fsencode(root)) and set(flat.classes) == {0}


CHANGES = {
    "added": lambda root: (root / "cat" / "new.png").write_bytes(b""),
    "removed": lambda root: (root / "eel" / "2-2.png").unlink(),
    "renamed deep below": lambda root: (root / "cat/deep/er/1.webp").rename(root / "cat/deep/er/3.webp"),
    "moved": lambda root: (root / "cat/deep/er/1.webp").rename(root / "eel/1.webp"),
    "a folder": lambda root: ((root / "cat" / "more").mkdir(), (root / "cat" / "more" / "1.png").write_bytes(b"")),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen(root, change):
    list_images_of_folders(os.fsencode(root), FOLDERS)
    CHANGES[change](root)
    assert_same(list_images_of_folders(os.fsencode(root), FOLDERS), wanted(root))
    for folder, _, _ in os.walk(root):  # also once it is long ago
        if os.stat(folder).st_mtime > LONG_AGO + 500:
            os.utime(folder, (LONG_AGO + 100, LONG_AGO + 100))
    assert_same(list_images_of_folders(os.fsencode(root), FOLDERS), wanted(root))


def test_a_folder_that_has_just_changed_is_not_saved(root, monkeypatch):
    os.utime(root / "cat")
    scanned = scans(monkeypatch)
    for _ in range(2):
        list_images_of_folders(os.fsencode(root), FOLDERS)
    assert len(scanned) == 2 * len(FOLDERS) and not list(Path(saved_listing.tempfile.gettempdir()).rglob("*.arrow"))


def test_a_damaged_listing_and_a_folder_of_another_user_are_passed_over(root, tmp_path, monkeypatch):
    list_images_of_folders(os.fsencode(root), FOLDERS)
    (saved,) = (tmp_path / "tmp").rglob("*.arrow")
    assert saved.parent.parent.stat().st_mode & 0o777 == 0o700
    saved.write_bytes(saved.read_bytes()[:100])
    assert_same(list_images_of_folders(os.fsencode(root), FOLDERS), wanted(root))
    monkeypatch.setattr(saved_listing.tempfile, "tempdir", str(root / "cat" / ".hidden.png"))
    assert_same(list_images_of_folders(os.fsencode(root), FOLDERS), wanted(root))


def test_one_of_several_processes_lists(tmp_path):
    make_images(tmp_path / "images")
    found = run_on_ranks("tests.unit.test_saved_listing:listed_by_a_rank", 3, {"folder": str(tmp_path)})
    assert sorted(scanned for scanned, _ in found) == [0, 0, len(FOLDERS)]
    assert {count for _, count in found} == {9}


def listed_by_a_rank(folder: str) -> tuple[int, int]:
    """Folders that this rank scans, and the images that it finds."""
    saved_listing.tempfile.tempdir = folder
    patch = pytest.MonkeyPatch()
    scanned = scans(patch)
    _, files = list_class_folders("data.path", f"{folder}/images")
    return len(scanned), len(files)
