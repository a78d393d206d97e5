"""Sets of images to be judged, or to be judged by: pixels read in parts, in a fixed order, from folders and files."""

import hashlib
import itertools
import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from torchtitan.checkpoint.manifest import read_json
from torchtitan.data import DATASETS, DataConfig, DatasetError, DatasetInfo
from torchtitan.data.base import Split
from torchtitan.data.image_decoding import decode_whole, decoding_problem, open_image, with_advice
from torchtitan.data.image_files import ImageList, found_instead, list_images, shown_path
from torchtitan.errors import DamagedFile, EvaluationError, first_line, unwrapped
from torchtitan.evaluation.npz_images import NPZ_SUFFIX, NPZArray, open_npz
from torchtitan.evaluation.sample_sets import RECORD
from torchtitan.files.regular import LARGEST_RECORD
from torchtitan.pictures.grids import to_rgb
from torchtitan.processes.launch import launch_number
from torchtitan.training.buckets import require_one_shape
from torchtitan.training.data_loading import read_checked

PROBED = 16  # images looked at before the work begins
IMAGES = "arr_0"
MOST_READERS = 8


class ImageSet(ABC):
    """Finite set of RGB images of one size.

    Attributes:
        place: of the images, in messages.
        readers: threads that may read at the same time.
    """

    place: str
    readers: int = 1

    @abstractmethod
    def __len__(self) -> int: ...

    @property
    @abstractmethod
    def size(self) -> tuple[int, int]:
        """Height and width of every image."""

    @abstractmethod
    def pixels(self, numbers: range) -> np.ndarray:
        """Read neighbouring images, uint8 [B, H, W, 3].

        Raises:
            EvaluationError: one cannot be read, or is of another size.
        """

    @abstractmethod
    def digest(self, numbers: range) -> bytes:
        """SHA-256 of neighbouring images as they are stored. Raises EvaluationError."""

    def stamp(self, numbers: range) -> bytes:
        """Sizes and times of the files of neighbouring images, which tell whether they were changed since they were hashed.

        Raises:
            EvaluationError: a file is not there any more.
        """
        return b""

    @abstractmethod
    def record(self) -> dict[str, Any]:
        """Record of the set's origin, for JSON."""

    def check(self) -> None:
        """Check that there are images, and that their values are 0..255. Raises EvaluationError."""
        if not len(self):
            raise EvaluationError(f"{self.place}: holds no images")
        numbers = np.unique(np.linspace(0, len(self) - 1, PROBED).astype(np.int64)).tolist()
        if max(int(self.pixels(range(number, number + 1)).max()) for number in numbers) <= 1:
            raise EvaluationError(f"{self.place}: no pixel is above 1 (images are compared in the range 0..255)")

    def first(self, count: int | None, option: str = "--count") -> "ImageSet":
        """First images of the set; None for all. Raises EvaluationError: there are fewer."""
        if count is None or count == len(self):
            return self
        if not 1 <= count <= len(self):
            raise EvaluationError(f"{option}: {count}, but {self.place} has {len(self)} images")
        return _First(self, count)


class _Within(ImageSet):
    """Images of another set."""

    def __init__(self, images: ImageSet) -> None:
        self.place, self.readers, self._images = images.place, images.readers, images

    def __len__(self) -> int:
        return len(self._images)

    @property
    def size(self) -> tuple[int, int]:
        return self._images.size

    def pixels(self, numbers: range) -> np.ndarray:
        return self._images.pixels(numbers)

    def digest(self, numbers: range) -> bytes:
        return self._images.digest(numbers)

    def stamp(self, numbers: range) -> bytes:
        return self._images.stamp(numbers)


class _First(_Within):
    """The first images of another set."""

    def __init__(self, images: ImageSet, count: int) -> None:
        super().__init__(images)
        self._count = count

    def __len__(self) -> int:
        return self._count

    def record(self) -> dict[str, Any]:
        return self._images.record() | {"of": len(self._images)}


class FolderImages(ImageSet):
    """Image files of a folder and the folders in it, by name."""

    def __init__(self, folder: Path) -> None:
        """Raises EvaluationError: it is no folder of images."""
        root = os.fsencode(folder)
        try:
            self._files = ImageList.of(root, [list_images(root)])
        except OSError as error:
            raise EvaluationError(f"{folder}: cannot be read: {error.strerror or error}") from error
        self.place, self.readers = str(folder), _readers()
        if not len(self._files):
            raise EvaluationError(f"{folder}: holds no images{found_instead(root)}")
        self._size = self._decoded(0).shape[:2]

    def __len__(self) -> int:
        return len(self._files)

    @property
    def size(self) -> tuple[int, int]:
        return self._size[0], self._size[1]

    def pixels(self, numbers: range) -> np.ndarray:
        images = np.empty((len(numbers), *self._size, 3), np.uint8)
        for slot, number in enumerate(numbers):
            image = self._decoded(number)
            if image.shape[:2] != self._size:
                raise self._mixed(number, image.shape[1::-1])
            images[slot] = image
        return images

    def digest(self, numbers: range) -> bytes:
        """Hash the files, and read the size in their headers: mixed sizes are found before any network runs."""
        digest = hashlib.sha256()
        for number in numbers:
            content = self._content(number)
            with _damage_as(partial(self._unreadable, number)), open_image(content) as image:
                size = image.size
            if sorted(size) != sorted(self._size):  # turned by EXIF, it may be either way
                raise self._mixed(number, size)
            digest.update(hashlib.sha256(content).digest())
        return digest.digest()

    def stamp(self, numbers: range) -> bytes:
        return _stamp([self._files.path(number) for number in numbers])

    def record(self) -> dict[str, Any]:
        return {"kind": "folder", "place": self.place}

    def _content(self, number: int) -> bytes:
        try:
            return self._files.content(number)
        except OSError as error:
            raise EvaluationError(f"{self._files.shown(number)}: cannot be read: {error.strerror or error}") from error

    def _decoded(self, number: int) -> np.ndarray:
        content = self._content(number)
        with _damage_as(partial(self._unreadable, number)):
            return decode_whole(content)

    def _unreadable(self, number: int, error: Exception) -> EvaluationError:
        problem = with_advice(decoding_problem(error), "mend it, or move it away")
        return EvaluationError(f"{self._files.shown(number)}: cannot be read: {problem}")

    def _mixed(self, number: int, size: Sequence[int]) -> EvaluationError:
        first = f"{self._files.shown(0)} has {self._size[1]} x {self._size[0]}"
        return EvaluationError(f"{self._files.shown(number)}: {size[0]} x {size[1]} pixels, and {first} (give one size)")


class NPZImages(ImageSet):
    """Images of an npz file, arr_0 uint8 [N, H, W, 3], read in parts."""

    def __init__(self, array: NPZArray) -> None:
        """Raises EvaluationError: they are of another kind or range."""
        self.place = str(array.path)
        shape, dtype = array.shape, array.dtype
        if len(shape) != 4 or shape[3] != 3 or 0 in shape[1:]:
            raise EvaluationError(f"{array.path}: arr_0 is {list(shape)}, not images [N, H, W, 3]")
        if dtype != np.uint8:
            raise EvaluationError(f"{array.path}: arr_0 is {dtype}, images are uint8 in 0..255")
        self._array = array

    def __len__(self) -> int:
        return self._array.shape[0]

    @property
    def size(self) -> tuple[int, int]:
        return self._array.shape[1], self._array.shape[2]

    def pixels(self, numbers: range) -> np.ndarray:
        return self._array.read(numbers.start, numbers.stop)

    def digest(self, numbers: range) -> bytes:
        return _hash_pixels(self.pixels(numbers))

    def stamp(self, numbers: range) -> bytes:
        return _stamp([os.fsencode(self.place)])

    def record(self) -> dict[str, Any]:
        return {"kind": "npz", "place": self.place}


class ParquetImages(ImageSet):
    """Images of a set of samples in one Parquet file."""

    def __init__(self, path: Path) -> None:
        """Raises EvaluationError: it cannot be read."""
        from pyarrow import parquet

        self.place = str(path)
        try:
            self._file = parquet.ParquetFile(path)
        except (OSError, ValueError) as error:  # pyarrow's own errors are such
            raise self._unreadable(error) from error
        groups = [self._file.metadata.row_group(group).num_rows for group in range(self._file.num_row_groups)]
        self._starts = np.cumsum([0, *groups])
        self._kept: tuple[int, list[bytes]] = (-1, [])
        self._size = self.pixels(range(1)).shape[1:3] if len(self) else (0, 0)

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def size(self) -> tuple[int, int]:
        return self._size[0], self._size[1]

    def pixels(self, numbers: range) -> np.ndarray:
        with _damage_as(self._unreadable):
            return np.stack([decode_whole(self._content(number)) for number in numbers])

    def digest(self, numbers: range) -> bytes:
        digest = hashlib.sha256()
        for number in numbers:
            digest.update(hashlib.sha256(self._content(number)).digest())
        return digest.digest()

    def stamp(self, numbers: range) -> bytes:
        return _stamp([os.fsencode(self.place)])

    def record(self) -> dict[str, Any]:
        return {"kind": "parquet", "place": self.place}

    def _content(self, number: int) -> bytes:
        group = int(np.searchsorted(self._starts, number, side="right")) - 1
        if self._kept[0] != group:
            try:
                rows = self._file.read_row_group(group, columns=["image"]).column("image").to_pylist()
                self._kept = group, [row["bytes"] for row in rows]
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise self._unreadable(error) from error
        return self._kept[1][number - int(self._starts[group])]

    def _unreadable(self, error: Exception) -> EvaluationError:
        return EvaluationError(f"{self.place}: cannot be read as a set of samples: {first_line(error)}")


class DatasetImages(ImageSet):
    """Images of splits of a dataset, rounded to 8 bits as samples are."""

    def __init__(self, config: DataConfig, info: DatasetInfo, split: str) -> None:
        """split: train, validation, or all: the training images, then those held out.

        Raises:
            EvaluationError: it holds no images of pixels, or none in that split.
            DatasetError.
        """
        self.place = f"dataset {config.name}"
        dataset = DATASETS[config.name]
        if dataset.holds_latents or info.image_shape[0] not in (1, 3):
            raise EvaluationError(f"{self.place}: holds latents, not images (name the dataset that they were made of)")
        if split == "validation" and not info.has_validation:
            raise EvaluationError(f"--split validation: {self.place} holds out no images here")
        splits: list[Split] = ["train"] if split == "train" else ["validation"]
        if split == "all":
            splits = ["train", "validation"] if info.has_validation else ["train"]
        self._parts = [dataset(config, part) for part in splits]
        require_one_shape(self._parts[0], "a set of images to compare")
        self._starts = np.cumsum([0, *map(len, self._parts)])
        self._config, self._info, self._split = config, info, split

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def size(self) -> tuple[int, int]:
        return self._info.image_shape[1], self._info.image_shape[2]

    def pixels(self, numbers: range) -> np.ndarray:
        pieces = []
        for part, start, end in zip(self._parts, self._starts, self._starts[1:], strict=False):
            inside = np.arange(max(numbers.start, start), min(numbers.stop, end))
            if len(inside):
                try:
                    pieces.append(to_rgb(read_checked(part, self._info, inside - start)["images"].numpy()))
                except DatasetError as error:
                    raise EvaluationError(f"{self.place}: {unwrapped(error)}") from error
        return np.concatenate(pieces)

    def digest(self, numbers: range) -> bytes:
        return _hash_pixels(self.pixels(numbers))

    def record(self) -> dict[str, Any]:
        return {"kind": "dataset", "place": self._config.name, "split": self._split}


def _hash_pixels(pixels: np.ndarray) -> bytes:
    """SHA-256 of pixels [B, H, W, 3] with their shape: the same bytes may be other images."""
    digest = hashlib.sha256(f"{list(pixels.shape)} ".encode())
    digest.update(np.ascontiguousarray(pixels).data)
    return digest.digest()


@contextmanager
def _damage_as(refusal: Callable[[Exception], EvaluationError]) -> Iterator[None]:
    """Turn what decoders raise at a damaged file, which is anything, into a refusal."""
    try:
        yield
    except EvaluationError:
        raise
    except Exception as error:
        raise refusal(error) from error


def _stamp(paths: Sequence[bytes]) -> bytes:
    stamp = hashlib.sha256()
    for path in paths:
        try:
            found = os.stat(path)
        except OSError as error:
            raise EvaluationError(f"{shown_path(path)}: cannot be read: {error.strerror or error}") from error
        stamp.update(f"{found.st_size} {found.st_mtime_ns} ".encode())
    return stamp.digest()


def _readers() -> int:
    """Threads of this rank that decode images: decoding lets others run."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(MOST_READERS, max(1, cores // launch_number("LOCAL_WORLD_SIZE", 1)))


def npz_images(path: Path) -> NPZImages:
    arrays = open_npz(path)
    if IMAGES not in arrays:
        there = ", ".join(arrays) or "nothing"
        raise EvaluationError(f"{path}: holds {there}, and no images {IMAGES} (statistics serve as --reference only)")
    return NPZImages(arrays[IMAGES])


# --format of a set of samples -> its images
_OF_FORMAT: dict[str, Callable[[Path], ImageSet]] = {"png": FolderImages, "npz": npz_images, "parquet": ParquetImages}


class _SampleSetImages(_Within):
    """Images of a finished set of samples, with the set's record."""

    def __init__(self, folder: Path, record: dict[str, Any]) -> None:
        """Raises EvaluationError: it is not finished, or damaged."""
        kind = record.get("format")
        if not isinstance(kind, str) or kind not in _OF_FORMAT:
            raise EvaluationError(f"{folder / RECORD}: is damaged: no format of a set (draw it anew)")
        file = folder if kind == "png" else folder / f"samples.{kind}"
        if not file.exists():
            raise EvaluationError(f"{folder}: its images are not all drawn (the command that began it resumes)")
        super().__init__(_OF_FORMAT[kind](file))
        self.place = str(folder)
        self._record = {key: value for key, value in record.items() if key not in ("sample_set", "images")}
        if len(self) != record.get("images"):
            there = f"{len(self)} of {record.get('images')} images"
            raise EvaluationError(f"{folder}: holds {there} of its set (the command that began it resumes)")

    def record(self) -> dict[str, Any]:
        return {"kind": "set", "place": self.place, "set": self._record}


def open_images(path: Path) -> ImageSet:
    """Open a set of samples, a folder of images, or an npz file of images.

    Raises:
        EvaluationError: it holds no images, or other values than 0..255.
    """
    if path.suffix == NPZ_SUFFIX and not path.is_dir():
        images: ImageSet = npz_images(path)
    elif not path.is_dir():
        raise EvaluationError(f"{path}: no such folder of images or {NPZ_SUFFIX} file")
    elif (path / RECORD).exists():
        images = _SampleSetImages(path, _set_record(path / RECORD))
    else:
        images = FolderImages(path)
    images.check()
    return images


def read_ahead(images: ImageSet, parts: Sequence[range]) -> Iterator[np.ndarray]:
    """Read parts of a set in order, the next ones while the caller works on one. Raises EvaluationError."""
    with ThreadPoolExecutor(images.readers) as pool:
        left = iter(parts)
        pending = deque(pool.submit(images.pixels, part) for part in itertools.islice(left, images.readers + 1))
        try:
            while pending:
                pixels = pending.popleft().result()
                pending.extend(pool.submit(images.pixels, part) for part in (next(left, None),) if part is not None)
                yield pixels
        finally:
            for future in pending:
                future.cancel()


def _set_record(path: Path) -> dict[str, Any]:
    try:
        record = read_json(path, dict, LARGEST_RECORD)
    except DamagedFile as error:
        raise EvaluationError(f"{path.parent}: {error} (draw the set anew)") from error
    if record.get("sample_set") != 1:
        raise EvaluationError(f"{path}: is no record of a set of samples (move it away to read the folder's images)")
    return record
