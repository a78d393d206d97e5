"""Sources of published latents to convert: images by number, in a fixed order.

Formats, by name:
    int8_file      one safetensors file, `latents` int8 [N, C, h, w] whose unit is 16 / 255, `labels` [N]: the file
                   imagenet_ci8x8.safetensors of the data set fal/cosmos-imagenet (16 channels, 32x32).
    npy_folders    two folders, `*_features` and `*_labels`, with a file 0.npy, 1.npy, ... per image in each,
                   [1, C, h, w] and [1]: what fast-DiT's extract_features.py writes, the VAE's samples times 0.18215.
    mirrored_shards  a folder of safetensors files with `latents`, `latents_flip` [n, C, h, w] and `labels` [n]: what
                   LightningDiT's extract_features.py writes. Images are numbered in the order of the files' names.
"""

import hashlib
import re
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import torch
from torch import Tensor

from torchtitan.errors import LatentStoreError, unwrapped
from torchtitan.files.npy_files import map_npy
from torchtitan.files.regular import check_regular
from torchtitan.files.shard_files import DamagedShard, whole_tensors
from torchtitan.latents.index import Normalization
from torchtitan.latents.values import pack_views

INT8_STEP = 16 / 255
SD_SCALE = 0.18215  # of Stable Diffusion's VAE, by which DiT multiplies its latents

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class LatentSource:
    """Source of latents, its properties and images.

    Attributes:
        num_images, shape: of the latents, shape (C, h, w).
        mirrored: whether mirror images are included.
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
        """Read images first .. end - 1: values float32 [n, V, 1, C, h, w], labels int64 [n]. Raises LatentStoreError.
        """
        raise NotImplementedError


class Int8File(LatentSource):
    """Source in the format int8_file."""

    int8_step = INT8_STEP

    def __init__(self, path: Path) -> None:
        """Raises LatentStoreError."""
        self._path = path
        found = _tensors_of(path, ("latents", "labels"))
        self.num_images, self.shape = _check_arrays(path, found, (torch.int8,))
        self.origin = {"format": "int8_file", "header": _header_digest([path])}

    def read(self, first: int, end: int) -> tuple[Tensor, Tensor]:
        latents, labels = _read_rows(self._path, ("latents", "labels"), first, end)
        return pack_views([(latents.to(torch.float32) * INT8_STEP, None)]), labels.to(torch.int64)


class NpyFolders(LatentSource):
    """Source in the format npy_folders."""

    def __init__(self, path: Path) -> None:
        """Raises LatentStoreError."""
        self._features = _only_folder(path, "_features")
        self._labels = _only_folder(path, "_labels")
        self._names = sorted(
            (entry.name for entry in self._features.iterdir() if re.fullmatch(r"\d{1,12}\.npy", entry.name)),
            key=lambda name: (int(name[:-4]), name),
        )
        if not self._names:
            raise LatentStoreError(f"{self._features}: no files 0.npy, 1.npy, ...")
        self.num_images = len(self._names)
        shape = _read_npy(self._features / self._names[0]).shape
        self.shape = shape[1:] if len(shape) == 4 and shape[0] == 1 else shape
        if len(self.shape) != 3:
            raise LatentStoreError(f"{self._features / self._names[0]}: {list(shape)} is no array [1, C, h, w]")
        channels = self.shape[0]
        self.normalization = Normalization(shift=[0.0] * channels, scale=[SD_SCALE] * channels, source="given")
        names = hashlib.sha256("\n".join(self._names).encode()).hexdigest()
        self.origin = {"format": "npy_folders", "files": names, "divided_by": SD_SCALE}

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


class MirroredShards(LatentSource):
    """Source in the format mirrored_shards."""

    mirrored = True

    def __init__(self, path: Path) -> None:
        """Raises LatentStoreError."""
        self._paths = sorted(path.glob("*.safetensors"))
        if not self._paths:
            raise LatentStoreError(f"{path}: no safetensors files")
        counts: list[int] = []
        for file in self._paths:
            found = _tensors_of(file, ("latents", "latents_flip", "labels"))
            count, shape = _check_arrays(file, found, _FLOATS)
            if found["latents_flip"] != found["latents"]:
                flipped, dtype = found["latents_flip"]
                raise LatentStoreError(f"{file}: 'latents_flip' is {dtype} {list(flipped)}, not as 'latents'")
            if counts and shape != self.shape:
                first = self._paths[0].name
                raise LatentStoreError(f"{file}: latents {list(shape)}, those of {first} {list(self.shape)}")
            self.shape = shape
            counts.append(count)
        self._starts = np.cumsum([0, *counts])
        self.num_images = int(self._starts[-1])
        self.origin = {"format": "mirrored_shards", "header": _header_digest(self._paths)}

    def read(self, first: int, end: int) -> tuple[Tensor, Tensor]:
        parts = []
        for path, begin, stop in zip(self._paths, self._starts, self._starts[1:], strict=False):
            if begin < end and stop > first:
                rows = int(max(first - begin, 0)), int(min(end, stop) - begin)
                parts.append(_read_rows(path, ("latents", "latents_flip", "labels"), *rows))
        latents, mirrored, labels = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        return pack_views([(latents, None), (mirrored, None)]), labels.to(torch.int64)


def open_source(path: Path) -> LatentSource:
    """Open published latents; their files determine the format. Raises LatentStoreError."""
    if path.is_file():
        return Int8File(path)
    if not path.is_dir():
        raise LatentStoreError(f"{path}: no such file or folder")
    if any(entry.is_dir() and entry.name.endswith("_features") for entry in path.iterdir()):
        return NpyFolders(path)
    if next(path.glob("*.safetensors"), None):
        return MirroredShards(path)
    raise LatentStoreError(
        f"{path}: no latents in a known format: an int8 safetensors file, folders *_features and *_labels of .npy "
        "files, or a folder of safetensors files with latents, latents_flip and labels"
    )


def _tensors_of(path: Path, names: tuple[str, ...]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    try:
        check_regular(path)
        found = whole_tensors([path])
    except DamagedShard as error:
        raise LatentStoreError(f"{path.parent}: {error}") from error
    except OSError as error:
        raise LatentStoreError(f"{path}: cannot be read: {error.strerror}") from error
    for name in names:
        if name not in found:
            raise LatentStoreError(f"{path}: has no tensor {name!r}")
    return found


def _check_arrays(path: Path, found: dict, dtypes: tuple[torch.dtype, ...]) -> tuple[int, tuple[int, int, int]]:
    """Check the arrays: number of images and their shape."""
    (shape, dtype), (label_shape, label_dtype) = found["latents"], found["labels"]
    if dtype not in dtypes or len(shape) != 4 or 0 in shape:
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise LatentStoreError(f"{path}: 'latents' is {dtype} {list(shape)}, not {wanted} [N, C, h, w]")
    if label_shape != shape[:1] or label_dtype not in _INTEGERS:
        raise LatentStoreError(f"{path}: 'labels' is {label_dtype} {list(label_shape)}, not {shape[0]} integers")
    return shape[0], shape[1:]


def _read_rows(path: Path, names: tuple[str, ...], first: int, end: int) -> list[Tensor]:
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            return [file.get_slice(name)[first:end] for name in names]
    except (OSError, safetensors.SafetensorError) as error:
        raise LatentStoreError(f"{path}: cannot be read: {unwrapped(error)}") from error


def _header_digest(paths: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        with open(path, "rb") as file:
            length = file.read(8)
            digest.update(length + file.read(int.from_bytes(length, "little")))
    return digest.hexdigest()


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
