"""Contents of captioned folders that are saved: read once on a machine, and again as soon as a file changes."""

import os
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.launcher import run_on_ranks
from torchtitan.data import captioned_folder, saved_contents, saved_listing
from torchtitan.data.captioned_folder import CaptionedFolderConfig, content_digest

COUNT = 5


def make_images(folder: Path) -> Path:
    folder.mkdir()
    for number in range(COUNT):
        pixels = np.random.default_rng(number).integers(0, 256, (64, 64 + number, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(f"thing {number}")
    return folder


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(saved_listing.tempfile, "tempdir", str(tmp_path))
    wait(monkeypatch)
    return make_images(tmp_path / "pictures")


def wait(patch: pytest.MonkeyPatch) -> None:
    """Let the last change of every file be long ago."""
    patch.setattr(saved_contents, "SECONDS_SETTLED", 0.0)


def noted(patch: pytest.MonkeyPatch) -> list[int]:
    """Positions of images that are read from now on."""
    original, read = captioned_folder._read_size_and_digest, []

    def call(files, position):
        read.append(position)
        return original(files, position)

    patch.setattr(captioned_folder, "_read_size_and_digest", call)
    return read


def opened(folder: Path, trigger_word: str = ""):
    """Contents of a folder as another process finds them."""
    captioned_folder._read_folder.cache_clear()
    return captioned_folder._read_folder("data.path", str(folder), trigger_word)


def test_files_are_read_once_and_the_contents_are_the_same(folder, monkeypatch):
    read = noted(monkeypatch)
    first, second = opened(folder), opened(folder)
    assert read == list(range(COUNT))
    assert (first.captions, first.sizes, first.digests) == (second.captions, second.sizes, second.digests)
    assert second.sizes == tuple((64 + number, 64) for number in range(COUNT))
    assert [second.files.path(position) for position in range(COUNT)] == [first.files.path(position) for position in range(COUNT)]
    assert opened(folder, "sks").captions == tuple(f"sks thing {number}" for number in range(COUNT))


def test_a_change_that_leaves_size_and_time_is_seen(folder):
    before = opened(folder)
    kept = (folder / "3.png").stat()
    content = bytearray((folder / "3.png").read_bytes())
    content[-1] ^= 1
    (folder / "3.png").write_bytes(content)
    os.utime(folder / "3.png", ns=(kept.st_atime_ns, kept.st_mtime_ns))
    after = opened(folder)
    assert [a == b for a, b in zip(before.digests, after.digests, strict=True)] == [True, True, True, False, True]
    (folder / "1.txt").write_text("other 1")
    assert opened(folder).captions[1] == "other 1"
    shutil.move(folder / "4.txt", folder / "9.txt")
    shutil.move(folder / "4.png", folder / "9.png")
    assert opened(folder).files.path(4).endswith(b"9.png")


def test_a_folder_that_has_just_changed_is_not_saved(folder, monkeypatch):
    monkeypatch.setattr(saved_contents, "SECONDS_SETTLED", 60.0)
    read = noted(monkeypatch)
    for _ in range(2):
        opened(folder)
    assert read == 2 * list(range(COUNT)) and not list(folder.parent.rglob("*.arrow"))
    later = time.time() + 100
    monkeypatch.setattr(saved_contents.time, "time", lambda: later)
    for _ in range(2):
        opened(folder)
    assert read == 3 * list(range(COUNT))


def test_one_of_several_processes_reads(tmp_path):
    make_images(tmp_path / "pictures")
    found = run_on_ranks("tests.unit.test_saved_contents:digest_of_a_rank", 3, {"folder": str(tmp_path)})
    assert sorted(count for count, _ in found) == [0, 0, COUNT] and len({digest for _, digest in found}) == 1


def digest_of_a_rank(folder: str) -> tuple[int, str]:
    """Images that this rank reads, and the digest of all."""
    saved_listing.tempfile.tempdir = folder
    patch = pytest.MonkeyPatch()
    wait(patch)
    read = noted(patch)
    digest = content_digest(CaptionedFolderConfig(path=f"{folder}/pictures", image_size=64))
    return len(read), digest
