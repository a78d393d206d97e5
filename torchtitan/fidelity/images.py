"""Sets of images to compare: pixels read in parts, in a fixed order, from a folder of images or an npz file."""

import copy
import csv
import itertools
import os
import shlex
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import numpy as np

from torchtitan.checkpoint.manifest import read_json
from torchtitan.data.image_decoding import decode_whole, decoding_problem, with_advice
from torchtitan.data.image_files import found_instead, list_images
from torchtitan.errors import DamagedFile, EvaluationError
from torchtitan.fidelity.npz import NPZ_SUFFIX, NPZArray, open_npz
from torchtitan.files.regular import LARGEST_RECORD
from torchtitan.processes.launch import launch_number, usable_cores
from torchtitan.programs import pasted

SET_RECORD, SET_CLASSES = "set.json", "labels.csv"  # of a set that scripts/sample.py has drawn
IMAGES, CLASSES = "arr_0", "arr_1"  # of an npz file
_PROBED = 16  # images looked at before the work begins
_MOST_READERS = 8


class ImageSet(ABC):
    """Finite set of RGB images of one size; readers: threads that may read at the same time."""

    place: str
    readers: int = 1
    _limit: int | None = None

    def __len__(self) -> int:
        return self._count() if self._limit is None else self._limit

    @property
    @abstractmethod
    def size(self) -> tuple[int, int]:
        """Height and width of every image."""

    @abstractmethod
    def pixels(self, numbers: range) -> np.ndarray:
        """Neighbouring images, uint8 [B, H, W, 3]. Raises EvaluationError: one cannot be read, or has another size."""

    @abstractmethod
    def record(self) -> dict[str, Any]:
        """Record of the set's origin, for JSON."""

    def classes(self) -> np.ndarray | None:
        """Class that each image was drawn for, int64 [N]; None: not known. Raises EvaluationError."""
        return None

    @property
    def num_classes(self) -> int | None:
        """Number of the classes that `classes` are of; 0 if they are numbers of texts; None: not known."""
        return None

    def check(self) -> None:
        """Check that there are images, and that their values are 0..255. Raises EvaluationError."""
        if not len(self):
            raise EvaluationError(f"{self.place}: holds no images")
        numbers = np.unique(np.linspace(0, len(self) - 1, _PROBED).astype(np.int64)).tolist()
        if max(int(self.pixels(range(number, number + 1)).max()) for number in numbers) <= 1:
            raise EvaluationError(f"{self.place}: no pixel is above 1 (images are compared in the range 0..255)")

    def first(self, count: int | None) -> Self:
        """First images of the set; None for all. Raises EvaluationError: there are fewer."""
        if count is not None and not 1 <= count <= len(self):
            raise EvaluationError(f"--count: {count}, but {self.place} has {len(self)} images")
        found = copy.copy(self)
        found._limit = count
        return found

    @abstractmethod
    def _count(self) -> int:
        """Number of all images."""


def written(path: Path) -> dict[str, str]:
    """When a file was last written: another one of its name is another set or reference."""
    with suppress(OSError):
        if not path.is_file():
            return {}
        return {"written": datetime.fromtimestamp(path.stat().st_mtime, UTC).isoformat(timespec="seconds")}
    return {}


class FolderImages(ImageSet):
    """Image files of a folder and the folders in it, by name; those of a set of samples with the set's record."""

    def __init__(self, folder: Path) -> None:
        """Raises EvaluationError: it is no folder of images, or an unfinished set of samples."""
        root = os.fsencode(folder)
        try:
            self._files = list_images(root)
        except OSError as error:
            raise EvaluationError(f"{folder}: cannot be read: {error.strerror or error}") from error
        self.place, self.readers = str(folder), _readers()
        if not len(self._files):
            raise EvaluationError(f"{folder}: holds no images{found_instead(root)}")
        height, width, _ = self._decoded(0).shape
        self._size, self._folder = (height, width), folder
        self._set = _set_record(folder / SET_RECORD)
        if self._set and len(self._files) != self._set.get("images"):
            there = f"{len(self._files)} of {self._set.get('images')} images"
            more = len(self._files) > (self._set.get("images") or 0)
            advice = "move those of elsewhere away" if more else "the command that began it resumes"
            raise EvaluationError(f"{folder}: holds {there} of its set ({advice})")

    @property
    def size(self) -> tuple[int, int]:
        return self._size

    def pixels(self, numbers: range) -> np.ndarray:
        images = np.empty((len(numbers), *self._size, 3), np.uint8)
        for slot, number in enumerate(numbers):
            image = self._decoded(number)
            if image.shape[:2] != self._size:
                this, first = (f"{shape[1]} x {shape[0]}" for shape in (image.shape, self._size))
                shown, of_first = self._files.shown(number), self._files.shown(0)
                keys = f"--data.path {shlex.quote(self.place)} --data.image_size N"
                made = f"{pasted('evaluate')} reference image_folder --name NAME {keys}"
                advice = f"bring samples to one size; a reference is made of any: {made}"
                raise EvaluationError(f"{shown}: {this} pixels, and {of_first} has {first} ({advice})")
            images[slot] = image
        return images

    def record(self) -> dict[str, Any]:
        if not self._set:
            return {"kind": "folder", "place": self.place}
        kept = {key: value for key, value in self._set.items() if key not in ("sample_set", "images")}
        return {"kind": "set", "place": self.place, "set": kept}

    @property
    def num_classes(self) -> int | None:
        with suppress(OSError, UnicodeDecodeError), (self._folder / SET_CLASSES).open(newline="") as file:
            if self._set and "prompt" in next(csv.reader(file), []):
                return 0
        return self._set.get("num_classes")

    def classes(self) -> np.ndarray | None:
        path = self._folder / SET_CLASSES
        if not self._set or not path.exists():
            return None
        names = [os.fsdecode(os.path.basename(self._files.path(number))) for number in range(len(self))]
        try:
            with path.open(newline="") as file:
                of_file = {row["file"]: int(row["class"]) for row in csv.DictReader(file)}
            return np.array([of_file[name] for name in names])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise EvaluationError(f"{path}: does not have the class of every image (draw the set anew)") from error

    def _count(self) -> int:
        return len(self._files)

    def _decoded(self, number: int) -> np.ndarray:
        shown = self._files.shown(number)
        try:
            content = self._files.content(number)
        except OSError as error:
            raise EvaluationError(f"{shown}: cannot be read: {error.strerror or error}") from error
        try:
            return decode_whole(content)
        except Exception as error:  # decoders raise anything at a damaged file
            problem = with_advice(decoding_problem(error), "mend it, or move it away")
            raise EvaluationError(f"{shown}: cannot be read: {problem}") from error


class NPZImages(ImageSet):
    """Images of an npz file as ADM's evaluation reads it: arr_0 uint8 [N, H, W, 3], arr_1 their classes.

    Source: Dhariwal and Nichol, "Diffusion models beat GANs on image synthesis", arXiv 2105.05233, published code.
    """

    def __init__(self, array: NPZArray, classes: NPZArray | None = None) -> None:
        """Raises EvaluationError: they are of another kind or range."""
        self.place = str(array.path)
        shape, dtype = array.shape, array.dtype
        if len(shape) != 4 or shape[3] != 3 or 0 in shape[1:]:
            raise EvaluationError(f"{array.path}: arr_0 is {list(shape)}, not images [N, H, W, 3]")
        if dtype != np.uint8:
            raise EvaluationError(f"{array.path}: arr_0 is {dtype}, images are uint8 in 0..255")
        self._array, self._classes = array, classes

    @property
    def size(self) -> tuple[int, int]:
        return self._array.shape[1], self._array.shape[2]

    def pixels(self, numbers: range) -> np.ndarray:
        return self._array.read(numbers.start, numbers.stop)

    def record(self) -> dict[str, Any]:
        return {"kind": "npz", "place": self.place, **written(Path(self.place))}

    def classes(self) -> np.ndarray | None:
        array = self._classes
        if array is None or array.shape != (self._count(),) or array.dtype.kind not in "iu":
            return None
        return array.whole()[: len(self)].astype(np.int64)

    def _count(self) -> int:
        return self._array.shape[0]


def npz_images(path: Path) -> NPZImages:
    """Images of an npz file. Raises EvaluationError: it holds none."""
    arrays = open_npz(path)
    if IMAGES not in arrays:
        there = ", ".join(arrays) or "nothing"
        raise EvaluationError(f"{path}: holds {there}, and no images {IMAGES} (statistics serve as --reference only)")
    return NPZImages(arrays[IMAGES], arrays.get(CLASSES))


def open_images(path: Path) -> ImageSet:
    """Open a folder or npz file of images. Raises EvaluationError: it has none, or other values than 0..255."""
    if path.suffix == NPZ_SUFFIX and not path.is_dir():
        images: ImageSet = npz_images(path)
    elif not path.is_dir():
        raise EvaluationError(f"{path}: no such folder of images or {NPZ_SUFFIX} file")
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
    """Record of a set of samples; empty where a folder is none. Raises EvaluationError."""
    if not path.exists():
        return {}
    try:
        record = read_json(path, dict, LARGEST_RECORD)
    except DamagedFile as error:
        raise EvaluationError(f"{path.parent}: {error} (draw the set anew)") from error
    if record.get("sample_set") != 1:
        raise EvaluationError(f"{path}: is no record of a set of samples (move it away to read the folder's images)")
    return record


def _readers() -> int:
    """Threads of this rank that decode images: decoding lets others run."""
    return min(_MOST_READERS, max(1, usable_cores() // launch_number("LOCAL_WORLD_SIZE", 1)))
