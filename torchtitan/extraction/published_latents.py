"""Published latents, converted to a store: images by number, in a fixed order.

Formats, by name:
    int8_file      one safetensors file, `latents` int8 [N, C, h, w] whose unit is 16 / 255, `labels` [N]: the file
                   imagenet_ci8x8.safetensors of the data set fal/cosmos-imagenet (16 channels, 32x32).
    npy_folders    two folders, `*_features` and `*_labels`, with a file 0.npy, 1.npy, ... per image in each,
                   [1, C, h, w] and [1]: what fast-DiT's extract_features.py writes, the VAE's samples times 0.18215.
    mirrored_shards  a folder of safetensors files with `latents`, `latents_flip` [n, C, h, w] and `labels` [n]: what
                   LightningDiT's extract_features.py writes. Images are numbered in the order of the files' names.
"""

import hashlib
import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import torch
from torch import Tensor
from tqdm import tqdm

from torchtitan.errors import LatentStoreError, unwrapped
from torchtitan.files.npy_files import map_npy
from torchtitan.files.shard_headers import DamagedShard, whole_tensors
from torchtitan.latents.index import INDEX_FILE, Normalization, StoreIndex, StorePlan, images_per_shard
from torchtitan.latents.store import LatentStore
from torchtitan.latents.values import pack_views
from torchtitan.latents.writer import StoreWriter

logger = logging.getLogger(__name__)

INT8_STEP = 16 / 255
SD_SCALE = 0.18215  # of Stable Diffusion's VAE, by which DiT multiplies its latents
SAMPLED_IMAGES = 16

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class LatentSource:
    """Source of latents, its properties and images.

    Attributes:
        int8_step: the step of the source's own int8 values, None where they are floats.
        normalization: used by the source's makers in training, None where it is not stated.
        origin: to distinguish it from other sources, the same wherever it lies.
    """

    num_images: int
    shape: tuple[int, int, int]
    mirrored = False
    int8_step: float | None = None
    normalization: Normalization | None = None
    origin: dict[str, Any]

    def read(self, first: int, end: int) -> tuple[Tensor, Tensor]:
        """Read images first .. end - 1: values float32 [n, V, 1, C, h, w], labels int64 [n]. Raises LatentStoreError."""
        raise NotImplementedError


class TensorFiles(LatentSource):
    """Source in the format int8_file, or mirrored_shards."""

    def __init__(self, paths: list[Path], mirrored: bool) -> None:
        """Raises LatentStoreError."""
        self._paths, self.mirrored = paths, mirrored
        self._names = ("latents", "latents_flip", "labels") if mirrored else ("latents", "labels")
        self.int8_step = None if mirrored else INT8_STEP
        found = [_checked_arrays(path, self._names, _FLOATS if mirrored else (torch.int8,)) for path in paths]
        self.shape = found[0][1]
        for path, (_, shape) in zip(paths, found, strict=True):
            if shape != self.shape:
                raise LatentStoreError(f"{path}: latents {list(shape)}, those of {paths[0].name} {list(self.shape)}")
        self._starts = np.cumsum([0, *(count for count, _ in found)])
        self.num_images = int(self._starts[-1])
        digest = hashlib.sha256()
        for path in paths:
            with open(path, "rb") as file:
                length = file.read(8)
                digest.update(length + file.read(int.from_bytes(length, "little")))
        self.origin = {"format": "mirrored_shards" if mirrored else "int8_file", "header": digest.hexdigest()}

    def read(self, first: int, end: int) -> tuple[Tensor, Tensor]:
        parts = []
        for path, begin, stop in zip(self._paths, self._starts, self._starts[1:], strict=False):
            if begin < end and stop > first:
                rows = slice(int(max(first - begin, 0)), int(min(end, stop) - begin))
                try:
                    with safetensors.safe_open(path, framework="pt") as file:
                        parts.append([file.get_slice(name)[rows] for name in self._names])
                except (OSError, safetensors.SafetensorError) as error:
                    raise LatentStoreError(f"{path}: cannot be read: {unwrapped(error)}") from error
        *views, labels = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        scale = self.int8_step or 1.0
        return pack_views([(view.to(torch.float32) * scale, None) for view in views]), labels.to(torch.int64)


class NpyFolders(LatentSource):
    """Source in the format npy_folders."""

    def __init__(self, path: Path) -> None:
        """Raises LatentStoreError."""
        self._features, self._labels = _only_folder(path, "_features"), _only_folder(path, "_labels")
        names = [entry.name for entry in self._features.iterdir() if re.fullmatch(r"\d{1,12}\.npy", entry.name)]
        self._names = sorted(names, key=lambda name: (int(name[:-4]), name))
        if not self._names:
            raise LatentStoreError(f"{self._features}: no files 0.npy, 1.npy, ...")
        self.num_images = len(self._names)
        first, last = self._names[0], self._names[-1]
        if (lacking := int(last[:-4]) - int(first[:-4]) + 1 - self.num_images) > 0:
            logger.warning(f"{self._features}: {lacking:,} of the files {first} to {last} are missing (copied whole?)")
        shape = _read_npy(self._features / self._names[0]).shape
        self.shape = shape[1:] if len(shape) == 4 and shape[0] == 1 else shape
        if len(self.shape) != 3:
            raise LatentStoreError(f"{self._features / self._names[0]}: {list(shape)} is no array [1, C, h, w]")
        channels = self.shape[0]
        self.normalization = Normalization(shift=[0.0] * channels, scale=[SD_SCALE] * channels, source="given")
        listed = hashlib.sha256("\n".join(self._names).encode()).hexdigest()
        self.origin = {"format": "npy_folders", "files": listed, "divided_by": SD_SCALE}

    def read(self, first: int, end: int) -> tuple[Tensor, Tensor]:
        names = self._names[first:end]
        latents = np.empty((len(names), *self.shape), np.float32)
        labels = np.empty(len(names), np.int64)
        for slot, name in enumerate(names):
            latents[slot] = self._checked(self._features / name, "f", self.shape)
            labels[slot] = self._checked(self._labels / name, "iu", ())
        return pack_views([(torch.from_numpy(latents) / SD_SCALE, None)]), torch.from_numpy(labels)

    @staticmethod
    def _checked(path: Path, kinds: str, shape: tuple[int, ...]) -> np.ndarray:
        array = _read_npy(path)
        if array.dtype.kind not in kinds or array.shape not in (shape, (1, *shape)):
            raise LatentStoreError(f"{path}: {array.dtype} {list(array.shape)} is not one image of {[1, *shape]}")
        return array.reshape(shape)


def open_source(path: Path) -> LatentSource:
    """Open published latents; their files determine the format. Raises LatentStoreError."""
    if path.is_file():
        return TensorFiles([path], mirrored=False)
    if not path.is_dir():
        raise LatentStoreError(f"{path}: no such file or folder")
    if any(entry.is_dir() and entry.name.endswith("_features") for entry in path.iterdir()):
        return NpyFolders(path)
    if files := sorted(path.glob("*.safetensors")):
        return TensorFiles(files, mirrored=True)
    raise LatentStoreError(
        f"{path}: no latents in a known format: an int8 safetensors file, folders *_features and *_labels of .npy "
        "files, or a folder of safetensors files with latents, latents_flip and labels"
    )


def plan_conversion(
    source: LatentSource, *, num_classes: int, class_names: list[str], measured: bool, shard_images: int | None
) -> StorePlan:
    """Plan the store of a source: int8 with the source's own step where it has one, or else float16.

    Args:
        num_classes: 0 stores no labels.
        measured: whether the normalisation is measured, or else taken from the source's makers.

    Raises:
        LatentStoreError: the source's makers say nothing about normalisation.
        pydantic.ValidationError: class names and classes disagree.
    """
    if not measured and source.normalization is None:
        raise LatentStoreError("the source says nothing about its normalization; have it measured")
    sample = hashlib.sha256()  # without labels, so that one may be corrected before a conversion resumes
    for number in sorted({*np.linspace(0, source.num_images - 1, SAMPLED_IMAGES, dtype=np.int64).tolist()}):
        sample.update(source.read(number, number + 1)[0].numpy().tobytes())
    return StorePlan(
        num_source_images=source.num_images, images_per_shard=shard_images or images_per_shard(source.num_images),
        shape=source.shape, posterior=False, mirrored=source.mirrored, dtype="int8" if source.int8_step else "float16",
        int8_step=source.int8_step, num_classes=num_classes, class_names=class_names, autoencoder={"name": "unknown"},
        normalization=None if measured else source.normalization, origin=source.origin | {"sample": sample.hexdigest()},
    )  # fmt: skip


def convert(source: LatentSource, folder: Path, plan: StorePlan) -> StoreIndex:
    """Write the store, or its missing shards.

    Raises:
        LatentStoreError: the source cannot be read, or the folder holds something else.
        OSError: the store cannot be written.
    """
    writer = StoreWriter(folder, plan)
    pending = writer.pending()
    if (folder / INDEX_FILE).exists():
        LatentStore(folder)  # refuses where a file was lost since
    written = plan.num_source_images - sum(len(plan.source_images_of(number)) for number in pending)
    with tqdm(total=plan.num_source_images, initial=written, unit="img", desc="converting", disable=not pending) as bar:
        for number in pending:
            images = plan.source_images_of(number)
            values, labels = source.read(images.start, images.stop)
            try:
                writer.write(number, values, labels if plan.num_classes else labels * 0)
            except LatentStoreError as error:
                advice = f" (with another --num-classes remove {folder} first)" if ": label " in str(error) else ""
                raise LatentStoreError(f"{error}{advice}") from error
            bar.update(len(images))
    return writer.finish()


def _checked_arrays(path: Path, names: tuple[str, ...], dtypes: tuple[torch.dtype, ...]) -> tuple[int, tuple[int, int, int]]:
    """Check the arrays of a file: number of images and their shape. Raises LatentStoreError."""
    try:
        found = whole_tensors([path])
    except DamagedShard as error:
        raise LatentStoreError(f"{path.parent}: {error}") from error
    except OSError as error:
        raise LatentStoreError(f"{path}: cannot be read: {error.strerror}") from error
    if missing := [name for name in names if name not in found]:
        raise LatentStoreError(f"{path}: has no tensor {missing[0]!r}")
    (shape, dtype), (label_shape, label_dtype) = found["latents"], found["labels"]
    if dtype not in dtypes or len(shape) != 4 or 0 in shape:
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise LatentStoreError(f"{path}: 'latents' is {dtype} {list(shape)}, not {wanted} [N, C, h, w]")
    if found[names[-2]] != found["latents"]:
        flipped, dtype = found["latents_flip"]
        raise LatentStoreError(f"{path}: 'latents_flip' is {dtype} {list(flipped)}, not as 'latents'")
    if label_shape != shape[:1] or label_dtype not in _INTEGERS:
        raise LatentStoreError(f"{path}: 'labels' is {label_dtype} {list(label_shape)}, not {shape[0]} integers")
    return shape[0], shape[1:]


def _only_folder(path: Path, ending: str) -> Path:
    folders = sorted(entry for entry in path.iterdir() if entry.is_dir() and entry.name.endswith(ending))
    if len(folders) != 1:
        raise LatentStoreError(f"{path}: {len(folders)} folders whose names end with {ending}, not one")
    return folders[0]


def _read_npy(path: Path) -> np.ndarray:
    try:
        return map_npy(path)
    except (OSError, ValueError) as error:
        raise LatentStoreError(f"{path}: cannot be read: {unwrapped(error)}") from error
