"""Latent store of images in buckets: a folder with one store for each shape, and an index of them, written last.

    STORE/buckets.json  512x768/index.json ...  768x512/index.json ...
"""

import functools
import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from torchtitan.errors import LatentStoreError
from torchtitan.files.durable import make_folder
from torchtitan.files.ownership import foreign_entry, foreign_text
from torchtitan.files.regular import user_path
from torchtitan.latents.index import (
    INDEX_FILE,
    Normalization,
    Sha256,
    StoreIndex,
    StoreRecord,
    parse_record,
    read_index,
    read_sealed,
    write_sealed,
)
from torchtitan.latents.statistics import ChannelMoments
from torchtitan.latents.store import LatentStore

BUCKETS_FILE = "buckets.json"
BUCKET = re.compile(r"\d+x\d+")


class BucketsIndex(StoreRecord):
    """Index of a folder's stores; checksums: of each one's index, by which another extraction's is found."""

    format: Literal["latent stores of several shapes"] = "latent stores of several shapes"
    version: Literal[1] = 1
    stores: list[str]
    checksums: list[Sha256]
    normalization: Normalization


def bucket_folder(store: Path, image_shape: tuple[int, int, int]) -> Path:
    """Folder of the images (C, H, W) of one shape."""
    return store / f"{image_shape[1]}x{image_shape[2]}"


def begin_buckets(store: Path, folders: Sequence[Path]) -> None:
    """Begin or resume a store of several shapes. Raises LatentStoreError: it holds something else, kept; OSError."""
    names = {folder.name for folder in folders}
    name = foreign_entry(store, is_own=lambda path: path.name in names or path.name == BUCKETS_FILE)
    if name is not None:
        raise LatentStoreError(foreign_text(store, name, "a latent store's of these shapes", "give a new or empty folder"))
    make_folder(store)


def finish_buckets(store: Path, folders: Sequence[Path]) -> None:
    """Finish a store of several shapes: write its index. Raises LatentStoreError, OSError."""
    indexes = [read_index(folder) for folder in folders]
    content = BucketsIndex(
        stores=[folder.name for folder in folders], checksums=[_checksum(folder) for folder in folders],
        normalization=_joined(indexes),
    )  # fmt: skip
    write_sealed(store / BUCKETS_FILE, content.model_dump(mode="json"))


def open_stores(folder: str | Path) -> list[LatentStore]:
    """Open a store, of one shape or several, with the normalisation of all. Raises LatentStoreError: not complete."""
    folder = user_path(folder)
    if not (folder / BUCKETS_FILE).is_file():
        if not (folder / INDEX_FILE).exists() and (part := _first_part(folder)):
            advice = "run the command that writes it again, and it resumes"
            raise LatentStoreError(f"{folder}: not finished, though {part} is; {advice}")
        return [LatentStore(folder)]
    content = parse_record(BucketsIndex, read_sealed(folder / BUCKETS_FILE), folder / BUCKETS_FILE)
    stores = []
    for name, checksum in zip(content.stores, content.checksums, strict=True):
        if Path(name).name != name or not (folder / name).is_dir():
            raise LatentStoreError(f"{folder / name}: missing, though {BUCKETS_FILE} lists it; take a good copy of it")
        if _checksum(folder / name) != checksum:
            text = f"is not the store that {BUCKETS_FILE} lists"
            raise LatentStoreError(f"{folder / name}: {text}; take good copies of both, or write the store anew")
        store = LatentStore(folder / name)
        store.index = store.index.model_copy(update={"normalization": content.normalization})
        stores.append(store)
    return stores


def _first_part(folder: Path) -> str | None:
    try:
        parts = sorted(path.name for path in folder.iterdir() if BUCKET.fullmatch(path.name) and (path / INDEX_FILE).is_file())
    except OSError:
        return None
    return parts[0] if parts else None


def _checksum(folder: Path) -> str:
    return hashlib.sha256((folder / INDEX_FILE).read_bytes()).hexdigest()


def _joined(indexes: Sequence[StoreIndex]) -> Normalization:
    first = indexes[0].normalization
    if first.source != "measured":
        return first
    moments = []
    for index in indexes:
        count = index.num_images * index.views * index.shape[1] * index.shape[2]
        scale, shift = np.array(index.normalization.scale), np.array(index.normalization.shift)
        moments.append(ChannelMoments(count, shift, count / scale**2))
    return functools.reduce(ChannelMoments.joined, moments).normalization()
