"""CIFAR-10 and CIFAR-100 from parquet files, the official python batches, or the Hugging Face hub."""

import pickle
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from torchtitan.conditions import Classes
from torchtitan.data.base import Batch, DataConfig, Dataset, DatasetError, DatasetInfo, Split
from torchtitan.data.bounded_tables import MAX_REPEATED_BYTES, read_rows
from torchtitan.data.class_folders import missing_path
from torchtitan.data.image_decoding import decoding_problem, open_image
from torchtitan.data.image_files import own_pictures_advice
from torchtitan.data.numpy_pickle import read_table
from torchtitan.errors import one_line
from torchtitan.extras import install
from torchtitan.files.regular import check_regular, user_path
from torchtitan.settings import setting

IMAGE_SHAPE = (3, 32, 32)
IMAGE_COLUMNS = ("img", "image")
MAX_HELD_OUT = 5000
MAX_FILE_BYTES = 4 << 30  # of images as their files store them; CIFAR's have 120 MB


@dataclass(frozen=True)
class CifarEdition:
    """Edition: the differences between the two collections.

    Attributes:
        title: in messages.
        class_names: one per label.
        label_column: of parquet files.
        folder: inside the official archive.
        train_batches, validation_batches: the files in it.
        label_key: of a batch.
    """

    title: str
    class_names: tuple[str, ...]
    label_column: str
    folder: str
    train_batches: tuple[str, ...]
    validation_batches: tuple[str, ...]
    label_key: str


@dataclass(kw_only=True)
class CifarConfig(DataConfig):
    """Keys of `[data]` for both names."""

    path: str = setting("", "folder of parquet files or of the official python batches, or a Hugging Face hub name", path=True)
    horizontal_flip: bool = setting(True, "mirror each training image with probability 1/2")


class Cifar(Dataset):
    """60,000 colour images [3, 32, 32]; each edition is a subclass that names it.

    Where the source has no validation images, the last tenth of the training images in stored order, at most
    5,000, is the validation split, and training leaves it out.
    """

    Config: ClassVar[type[CifarConfig]]
    edition: ClassVar[CifarEdition]

    @classmethod
    def info(cls, config: CifarConfig) -> DatasetInfo:
        _open_source(config.path, cls.edition).check()
        names = cls.edition.class_names
        return DatasetInfo(IMAGE_SHAPE, Classes(len(names), names))

    def __init__(self, config: CifarConfig, split: Split) -> None:
        source = _open_source(config.path, self.edition)
        self._parts = source.read(split if source.has_validation else "train")
        self._starts = np.cumsum([0] + [len(part.labels) for part in self._parts])
        stored = int(self._starts[-1])
        held_out = 0 if source.has_validation else min(MAX_HELD_OUT, stored // 10)
        if split == "validation" and not source.has_validation:
            self._first, self._length = stored - held_out, held_out
        else:
            self._first, self._length = 0, stored - held_out
        if self._length == 0:
            raise DatasetError(f"data.path: {config.path!r} has no images for the {split} split")

    def __len__(self) -> int:
        return self._length

    def fetch(self, indices: np.ndarray) -> Batch:
        images = np.empty((len(indices), *IMAGE_SHAPE), np.uint8)
        labels = np.empty(len(indices), np.int64)
        for slot, position in enumerate(indices + self._first):
            number = int(np.searchsorted(self._starts, position, side="right")) - 1
            part, row = self._parts[number], int(position - self._starts[number])
            images[slot], labels[slot] = part.image(row), part.labels[row]
        return {"images": torch.from_numpy(images).to(torch.float32) / 127.5 - 1, "class": torch.from_numpy(labels)}


@dataclass(frozen=True)
class _RawImages:
    """Python batch of raw pixels."""

    origin: str
    labels: np.ndarray  # int64 [N]
    pixels: np.ndarray  # uint8 [N, 3, 32, 32]

    def image(self, row: int) -> np.ndarray:
        return self.pixels[row]


@dataclass(frozen=True)
class _EncodedImages:
    """Table of PNG or JPEG files, end to end in one array: loader processes share its memory."""

    origin: str
    labels: np.ndarray  # int64 [N]
    content: np.ndarray  # uint8
    offsets: np.ndarray  # int64 [N + 1]

    def image(self, row: int) -> np.ndarray:
        return _decode(self.origin, row, self.content[self.offsets[row] : self.offsets[row + 1]].tobytes())


def _decode(origin: str, row: int, encoded: bytes) -> np.ndarray:
    """Decode to pixels uint8 [3, 32, 32]. Raises DatasetError."""
    try:
        with open_image(encoded) as image:
            width, height = image.size
            pixels = np.asarray(image.convert("RGB")) if width == height == 32 else None  # [32, 32, 3]
    except Exception as error:
        reason = decoding_problem(error)
        raise DatasetError(f"{origin}: row {row}: the image cannot be decoded ({reason})") from error
    if pixels is None:
        raise DatasetError(f"{origin}: row {row}: the image is {width}x{height}, not 32x32")
    return pixels.transpose(2, 0, 1)


class _PythonBatches:
    """Folder inside cifar-10-python.tar.gz or cifar-100-python.tar.gz."""

    has_validation = True

    def __init__(self, folder: Path, edition: CifarEdition) -> None:
        self._folder = folder
        self._edition = edition
        for name in edition.train_batches + edition.validation_batches:
            if not (folder / name).is_file():
                archive = f"{edition.title.lower()}-python.tar.gz"
                raise DatasetError(f"data.path: {folder} lacks {name}: unpack the whole {archive}")

    def check(self) -> None:
        self.read("train")
        self.read("validation")

    def read(self, split: Split) -> list[_RawImages]:
        names = self._edition.train_batches if split == "train" else self._edition.validation_batches
        return [self._read_batch(self._folder / name) for name in names]

    def _read_batch(self, path: Path) -> _RawImages:
        try:
            table = read_table(path)
        except (pickle.UnpicklingError, OSError) as error:
            raise DatasetError(f"{path}: not a {self._edition.title} batch: {one_line(error)}") from error
        key = self._edition.label_key
        pixels, labels = table.get("data"), table.get(key)
        if not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8 or pixels.shape[1:] != (3072,):
            raise DatasetError(f"{path}: 'data' is not an array of bytes [N, 3072]")
        labels = _integers(labels)
        if labels is None or labels.shape != pixels.shape[:1]:
            raise DatasetError(f"{path}: '{key}' is not a list of {len(pixels)} integers")
        labels = _checked_labels(str(path), labels, self._edition)
        return _RawImages(str(path), labels, pixels.reshape(-1, *IMAGE_SHAPE))


class _ParquetFolder:
    """Parquet files as Hugging Face `datasets` writes them; files are read in the order of their names."""

    def __init__(self, folder: Path, files: list[Path], edition: CifarEdition) -> None:
        self._edition = edition
        self._files = {
            "train": sorted(file for file in files if file.name.startswith("train")),
            "validation": sorted(file for file in files if file.name.startswith(("test", "validation"))),
        }
        if not self._files["train"]:
            raise DatasetError(f"data.path: {folder} has no parquet file whose name starts with 'train'")
        self.has_validation = bool(self._files["validation"])

    def check(self) -> None:
        for split in ("train", "validation"):
            rows = [self._check_file(file) for file in self._files[split]]
            if rows and sum(rows) == 0:
                raise DatasetError(f"{self._files[split][0]}: no rows")

    def read(self, split: Split) -> list[_EncodedImages]:
        return [self._read_file(file) for file in self._files[split]]

    def _check_file(self, path: Path) -> int:
        """Check all labels and the first image; returns the number of rows."""
        with _open_parquet(path) as file:
            image_column = _find_columns(str(path), file.schema_arrow, self._edition)
            labels = _label_array(str(path), file.read(columns=[self._edition.label_column]), self._edition)
            for column in _column_chunks(file, f"{image_column}.bytes"):
                if column.statistics and column.statistics.null_count:
                    raise DatasetError(f"{path}: {image_column}.bytes is empty in places: it stores paths, not images")
            if len(labels):
                first = next(file.iter_batches(1, columns=[f"{image_column}.bytes"])).column(0).field("bytes")
                _check_present(str(path), image_column, first)
                _decode(str(path), 0, first[0].as_py())
        return len(labels)

    def _read_file(self, path: Path) -> _EncodedImages:
        with _open_parquet(path) as file:
            image_column = _find_columns(str(path), file.schema_arrow, self._edition)
            said = sum(column.total_uncompressed_size for column in _column_chunks(file, f"{image_column}.bytes"))
            most = min(said, MAX_FILE_BYTES) + MAX_REPEATED_BYTES
            groups = range(file.num_row_groups)
            table = read_rows(str(path), file, groups, image_column, self._edition.label_column, most)
        return _from_columns(str(path), image_column, table["image"], table["label"], self._edition)


def _column_chunks(file: Any, path: str) -> list[Any]:
    """Column statistics of each row group in the footer."""
    groups = [file.metadata.row_group(number) for number in range(file.num_row_groups)]
    columns = [group.column(number) for group in groups for number in range(group.num_columns)]
    return [column for column in columns if column.path_in_schema == path]


@contextmanager
def _open_parquet(path: Path) -> Iterator[Any]:
    from pyarrow import parquet

    try:
        check_regular(path)
        with parquet.ParquetFile(path) as file:
            yield file
    except DatasetError:
        raise
    except Exception as error:
        raise DatasetError(f"{path}: cannot be read as parquet ({one_line(error)})") from error


class _HubDataset:
    """Dataset of the Hugging Face hub, downloaded or taken from the local cache by the package `datasets`."""

    def __init__(self, name: str, edition: CifarEdition) -> None:
        self._name = name
        self._edition = edition
        try:
            import datasets
        except ImportError as error:
            raise DatasetError(
                f"data.path: {name!r} is no folder here; to read it from the Hugging Face hub: {install('hub')}"
            ) from error
        self._package = datasets
        self._splits: dict[str, Any] | None = None

    @property
    def has_validation(self) -> bool:
        return any(name in self._load() for name in ("validation", "test"))

    def check(self) -> None:
        features = self._ask(self._package.load_dataset_builder).info.features
        if features is not None:
            _find_columns(self._name, features.arrow_schema, self._edition)

    def read(self, split: Split) -> list[_EncodedImages]:
        splits = self._load()
        names = ("train",) if split == "train" else ("validation", "test")
        origins = {f"{self._name} ({name})": splits[name] for name in names if name in splits}
        return [
            _from_table(origin, stored.with_format("arrow")[:], self._edition) for origin, stored in origins.items()
        ]

    def _load(self) -> dict[str, Any]:
        if self._splits is None:
            self._splits = self._ask(self._package.load_dataset)
            if "train" not in self._splits:
                raise DatasetError(f"data.path: the hub's {self._name!r} has no split 'train'")
        return self._splits

    def _ask(self, function: Any) -> Any:
        try:
            return function(self._name)
        except Exception as error:
            raise DatasetError(
                f"data.path: {self._name!r} is no folder here, and the Hugging Face hub did not give it "
                f"({one_line(error)})"
            ) from error


def _open_source(path: str, edition: CifarEdition) -> _PythonBatches | _ParquetFolder | _HubDataset:
    if not path:
        raise DatasetError(f"data.path: not given; {edition.title} needs a folder or a Hugging Face hub name")
    folder = user_path(path)
    if not folder.exists():
        if re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", path):
            return _HubDataset(path, edition)
        raise missing_path("data.path", path)
    if not folder.is_dir():
        raise DatasetError(f"data.path: {path!r} is a file; give its folder")
    for candidate in (folder, folder / edition.folder):
        if any((candidate / name).exists() for name in edition.train_batches + edition.validation_batches):
            return _PythonBatches(candidate, edition)
    # A copy of a hub repository keeps its files one folder down (data/, plain_text/).
    files = list(folder.glob("*.parquet")) or list(folder.glob("[!.]*/*.parquet"))
    if not files:
        text = f"data.path: {path!r} holds neither parquet files nor {edition.title}'s python batches"
        raise DatasetError(f"{text} ({advice})" if (advice := own_pictures_advice(path)) else text)
    if len({file.parent for file in files}) > 1:
        raise DatasetError(f"data.path: {path!r} has parquet files in several folders; give one of them")
    return _ParquetFolder(folder, files, edition)


def _find_columns(origin: str, schema: Any, edition: CifarEdition) -> str:
    """Find the image column's name; raise DatasetError where the columns are not the edition's."""
    import pyarrow

    image_column = next((name for name in IMAGE_COLUMNS if name in schema.names), None)
    label_column = edition.label_column
    if image_column is None or label_column not in schema.names:
        names = ", ".join(schema.names) or "none"
        raise DatasetError(f"{origin}: needs the columns 'img' (or 'image') and '{label_column}', has {names}")
    image_type, label_type = schema.field(image_column).type, schema.field(label_column).type
    if not pyarrow.types.is_struct(image_type) or image_type.get_field_index("bytes") < 0:
        raise DatasetError(f"{origin}: column '{image_column}' is {image_type}, not a struct with a field 'bytes'")
    if not pyarrow.types.is_integer(label_type):
        raise DatasetError(f"{origin}: column '{label_column}' is {label_type}, not an integer")
    return image_column


def _from_table(origin: str, table: Any, edition: CifarEdition) -> _EncodedImages:
    from pyarrow import compute

    image_column = _find_columns(origin, table.schema, edition)
    encoded = compute.struct_field(table[image_column], "bytes")
    return _from_columns(origin, image_column, encoded, table[edition.label_column], edition)


def _from_columns(origin: str, image_column: str, encoded: Any, labels: Any, edition: CifarEdition) -> _EncodedImages:
    import pyarrow

    _check_present(origin, image_column, encoded)
    array = encoded.cast(pyarrow.large_binary()).combine_chunks()
    _, offset_buffer, content_buffer = array.buffers()
    offsets = np.frombuffer(offset_buffer, np.int64)[array.offset : array.offset + len(array) + 1]
    content = np.frombuffer(content_buffer, np.uint8) if content_buffer else np.empty(0, np.uint8)
    table = pyarrow.table({edition.label_column: labels})
    return _EncodedImages(origin, _label_array(origin, table, edition), content, offsets)


def _check_present(origin: str, image_column: str, encoded: Any) -> None:
    if encoded.null_count:
        row = encoded.is_null().to_pylist().index(True)
        raise DatasetError(f"{origin}: row {row}: {image_column}.bytes is empty: it stores a path, not an image")


def _label_array(origin: str, table: Any, edition: CifarEdition) -> np.ndarray:
    column = table[edition.label_column]
    if column.null_count:
        raise DatasetError(f"{origin}: row {column.is_null().to_pylist().index(True)}: the label is missing")
    return _checked_labels(origin, column.to_numpy(), edition)


def _integers(labels: Any) -> np.ndarray | None:
    """Convert a list or array of plain integers to an array; None for anything else, such as a ragged list."""
    if isinstance(labels, list) and all(type(label) is int and abs(label) < 1 << 62 for label in labels):
        return np.array(labels, np.int64)
    return labels if isinstance(labels, np.ndarray) and labels.dtype.kind == "i" else None


def _checked_labels(origin: str, labels: np.ndarray, edition: CifarEdition) -> np.ndarray:
    largest = len(edition.class_names) - 1
    wrong = np.flatnonzero((labels < 0) | (labels > largest))
    if len(wrong):
        raise DatasetError(f"{origin}: row {wrong[0]}: label {labels[wrong[0]]} is not in 0..{largest}")
    return labels.astype(np.int64)
