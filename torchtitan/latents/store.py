"""Reader of a latent store: opened by its index alone, random access through memory maps."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from torchtitan.errors import LatentStoreError
from torchtitan.files.regular import user_path
from torchtitan.latents.captions import CaptionReader
from torchtitan.latents.index import INDEX_FILE, FileRecord, StoreIndex, read_index
from torchtitan.latents.shards import MappedShard, map_shard
from torchtitan.latents.values import check_numbers, decode


class LatentStore:
    """Latent store, complete.

    Opening reads the index and the sizes of the shards. A shard is mapped when it is first read; all processes share
    its pages. The object may be pickled: a copy maps shards anew.
    """

    def __init__(self, folder: str | Path) -> None:
        """Raises LatentStoreError: it is no complete store."""
        self.folder = user_path(folder)
        self.index: StoreIndex = read_index(self.folder)
        for name, record in self.index.files().items():
            if problem := _size_problem(self.folder / name, record):
                raise LatentStoreError(problem)
        self._first_images = self.index.first_images()
        self._shards: dict[int, MappedShard] = {}
        self.captions = CaptionReader(self.folder, self.index.captions) if self.index.captions else None

    def __len__(self) -> int:
        return self.index.num_images

    def __getstate__(self) -> dict:
        return self.__dict__ | {"_shards": {}}

    def read(self, images: np.ndarray, views: np.ndarray | None = None) -> tuple[Tensor, Tensor]:
        """Read images in any order; raw values, not normalised.

        Args:
            images: numbers in [0, len(self)), int64 [B].
            views: 0: the image, 1: its mirror image, int64 [B]; None: all 0.

        Returns:
            values float32 [B, P, C, h, w], P = 1 (the latent) or 2 (mean, standard deviation); labels int64 [B].

        Raises:
            LatentStoreError: a shard cannot be read or is not what the index says, or a label is out of range.
        """
        stored, scales, labels = self.read_stored(images, views)
        return decode(stored, scales, self.index.dtype), torch.from_numpy(labels)

    def read_stored(
        self, images: np.ndarray, views: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray | None, np.ndarray]:
        """Read stored values without converting to float32: `values.decode` does that.

        Returns:
            integers of the dtype's width [B, P, C, h, w], scales float32 [B, P, C] of int8 or None, labels int64 [B].
        """
        index = self.index
        numbers, rows, shards = self._places(images)
        chosen = np.zeros_like(images) if views is None else views
        width = np.int8 if index.dtype == "int8" else np.int16
        stored = np.empty((len(images), index.parts, *index.shape), width)
        scales = np.empty((len(images), index.parts, index.shape[0]), np.float32) if index.dtype == "int8" else None
        labels = np.empty(len(images), np.int64)
        places = zip(numbers.tolist(), rows.tolist(), chosen.tolist(), strict=True)
        for slot, (number, row, view) in enumerate(places):
            shard = shards[number]
            stored[slot] = shard.latents[row, view]
            labels[slot] = shard.labels[row]
            if scales is not None and shard.scales is not None:
                scales[slot] = shard.scales[row, view]
        self._check(labels, None, images)
        return stored, scales, labels

    def caption_numbers(self, images: np.ndarray) -> np.ndarray:
        """Numbers of the captions of images of a store with captions, int64 [B]. Raises LatentStoreError as `read`."""
        numbers, rows, shards = self._places(images)
        found = np.empty(len(images), np.int64)
        for slot, (number, row) in enumerate(zip(numbers.tolist(), rows.tolist(), strict=True)):
            captions = shards[number].captions
            assert captions is not None  # the shard was mapped by the index
            found[slot] = captions[row]
        self._check(np.zeros_like(found), found, images)
        return found

    def _check(self, labels: np.ndarray, captions: np.ndarray | None, images: np.ndarray) -> None:
        try:
            check_numbers(labels, captions, images, self.index)
        except LatentStoreError as error:
            raise LatentStoreError(f"{self.folder}: {error}; the index does not describe its shard") from error

    def _places(self, images: np.ndarray) -> tuple[np.ndarray, np.ndarray, dict[int, MappedShard]]:
        """Shard of each image and row in it, int64 [B] both, and the shards, mapped."""
        numbers = np.searchsorted(self._first_images, images, side="right") - 1
        shards = {number: self._shards.get(number) or self._map(number) for number in set(numbers.tolist())}
        return numbers, images - self._first_images[numbers], shards

    def _map(self, number: int) -> MappedShard:
        shard = map_shard(self.folder, number, self.index)
        self._shards[number] = shard
        return shard


def verify_shards(folder: Path, index: StoreIndex) -> Iterator[str]:
    """Read every byte of a store: for each of `index.files()` in order its problem, one line, or ""."""
    for name, record in index.files().items():
        yield _size_problem(folder / name, record) or _checksum_problem(folder / name, record)


def check_autoencoder(index: StoreIndex, place: str, identity: dict) -> None:
    """Check that latents are of this autoencoder, or of "unknown". Raises LatentStoreError: they are another's."""
    made_with = index.autoencoder
    if made_with["name"] == "unknown" or made_with == identity:
        return
    if made_with["name"] != identity["name"]:
        raise LatentStoreError(
            f"{place}: made with the autoencoder {made_with['name']!r}, not {identity['name']!r}; name "
            "that one, or another store"
        )
    differing = sorted(key for key in made_with.keys() | identity.keys() if made_with.get(key) != identity.get(key))
    raise LatentStoreError(
        f"{place}: made with another {identity['name']!r} than this one ({', '.join(differing)} differ); give "
        "the files it was made with, or another store"
    )


def _size_problem(path: Path, record: FileRecord) -> str:
    try:
        size = path.stat().st_size
    except OSError:
        return f"{path}: missing, though {INDEX_FILE} lists it; take a good copy of it"
    if size != record.size:
        return f"{path}: {size} bytes, not {record.size}: cut short or another's; take a good copy of it"
    return ""


def _checksum_problem(path: Path, record: FileRecord) -> str:
    try:
        with open(path, "rb") as file:
            good = hashlib.file_digest(file, "sha256").hexdigest() == record.sha256
    except OSError as error:
        return f"{path}: cannot be read: {error.strerror}"
    return "" if good else f"{path}: damaged, its SHA-256 is another; take a good copy of it"
