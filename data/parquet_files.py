"""Parquet files in a folder, a store or on the Hugging Face hub: the files of a split, and their footers."""

import json
import os
import posixpath
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import numpy as np
from tqdm import tqdm

from torchtitan.data.base import DatasetError
from torchtitan.data.class_folders import missing_path
from torchtitan.data.derived_classes import num_classes_of
from torchtitan.data.image_columns import Columns, arrow_features, find_columns
from torchtitan.errors import one_line
from torchtitan.extras import install
from torchtitan.files.regular import check_regular

HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
FOOTERS_AT_ONCE = 16


@dataclass(frozen=True)
class RowGroups:
    """Row groups of many files, as one table in the order of the files' names.

    Attributes:
        url: folder or file, in fsspec's form.
        files: paths in its file system.
        num_classes: labels are 0 .. num_classes - 1; 0 without labels.
        file, number: of each row group: its file, and its number within the file, int32 [K].
        starts: first row of each, int64 [K + 1].
        image_bytes: of the columns of images and captions of each, decompressed, int64 [K].
    """

    url: str
    files: tuple[str, ...]
    columns: Columns
    num_classes: int
    file: np.ndarray
    number: np.ndarray
    starts: np.ndarray
    image_bytes: np.ndarray

    def __len__(self) -> int:
        return len(self.file)


def table_url(path: str, revision: str) -> str:
    """URL for fsspec from `data.path`: a URL, a local path, or a name on the hub. Raises DatasetError."""
    local = os.path.expanduser(path)
    if HUB_NAME.fullmatch(path) and not os.path.exists(local):
        return f"hf://datasets/{path}" + (f"@{quote(revision, safe='')}" if revision else "")
    if revision:
        raise DatasetError(f"data.revision: {path!r} is no name on the Hugging Face hub; leave the key out")
    if "://" not in path and not os.path.exists(local):
        raise missing_path("data.path", path)
    return path if "://" in path else os.path.abspath(local)


def read_footers(
    url: str, subset: str, split: str, image_column: str, label_column: str, caption_column: str = "",
    labelled: bool = True,
) -> RowGroups:  # fmt: skip
    """Read the footers of a split's files.

    Args:
        subset: folder of the split's files, needed where several subsets have it; or "".
        split: files are those whose name begins with it, or which lie in a folder of that name.
        caption_column: name of a column to be read instead of labels, or "".

    Raises:
        DatasetError: the URL cannot be reached, there are no files, or they are damaged, differ, or lack the columns.
    """
    files = reaching(url, lambda: _find_files(url, subset, split))
    with ThreadPoolExecutor(FOOTERS_AT_ONCE) as pool:
        reading = pool.map(lambda file: _read_footer(url, file), files)
        footers = list(tqdm(reading, "reading footers", len(files), delay=2))
    features = [_features(footer) for footer in footers]
    columns = find_columns(files[0], features[0], image_column, label_column, caption_column, labelled)
    for file, footer in zip(files, footers, strict=True):
        _check_label_type(file, footer.schema.to_arrow_schema(), columns)
    for file, others in zip(files, features, strict=True):
        if any(others.get(name) != features[0].get(name) for name in (columns.image, columns.beside)):
            named = f"{columns.image!r} and {columns.beside!r}"
            raise DatasetError(f"{file}: its columns {named} are not those of {files[0]}")
    return _join(url, files, footers, columns)


def reaching(url: str, ask: Callable[[], Any]) -> Any:
    """Guard calls that leave this machine. Raises DatasetError, one line."""
    try:
        return ask()
    except DatasetError:
        raise
    except ImportError as error:
        extras = f"for hf://: {install('hub')}; for s3:// and gs://: {install('remote')}"
        raise DatasetError(f"data.path: {url}: {error} ({extras})") from error
    except Exception as error:  # each store's package has its own
        raise DatasetError(f"data.path: {url} cannot be read ({one_line(error)})") from error


def open_storage(url: str) -> tuple[Any, str]:
    """Open fsspec's file system of a URL, and return it with the path in it."""
    from fsspec.core import url_to_fs

    return url_to_fs(url)


def _find_files(url: str, subset: str, split: str) -> tuple[str, ...]:
    storage, root = open_storage(url)
    if storage.isfile(root):
        for key, given in (("config", subset), ("split", "" if split == "train" else split)):
            if given:
                raise DatasetError(f"data.path: {url} is one file, of which no {key} {given!r} can be chosen (give its folder)")
        return (root,)
    found = sorted(path for path in storage.find(root) if path.endswith(".parquet"))
    if not found:
        raise DatasetError(f"data.path: {url}: no parquet files there (data.streaming = false reads other formats)")
    inside = {path: path[len(root) :].strip("/") for path in found}
    folders = {path: posixpath.dirname(name).split("/") for path, name in inside.items()}
    of_split = [
        path
        for path, name in inside.items()
        if split in folders[path] or re.match(rf"{re.escape(split)}[-._]", posixpath.basename(name))
    ]
    chosen = [path for path in of_split if not subset or subset in folders[path]]
    if not chosen:
        where = f" in a folder {subset!r}" if subset else ""
        raise DatasetError(
            f"data.path: {url}: no parquet file{where} of split {split!r}: none begins so or lies in a folder of it "
            f"(the first is {inside[found[0]]})"
        )
    places = sorted({posixpath.dirname(inside[path]) for path in chosen})
    if len(places) > 1:
        raise DatasetError(f"data.config: {url} has split {split!r} in several folders, {', '.join(places)}; say which")
    return tuple(chosen)


def _read_footer(url: str, file: str) -> Any:
    from pyarrow import parquet

    storage, _ = open_storage(url)

    def read() -> Any:
        if "file" in storage.protocol:  # on this machine, where a pipe would wait for ever
            check_regular(file)
        with storage.open(file, "rb") as opened:
            return parquet.read_metadata(opened)

    return reaching(file, read)


def _features(footer: Any) -> dict[str, Any]:
    """Features of the columns from the file's metadata, or else from their types."""
    schema = footer.schema.to_arrow_schema()
    try:
        described = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
    except (KeyError, ValueError, TypeError, RecursionError):
        described = None
    return described if isinstance(described, dict) else arrow_features(schema)


def _join(url: str, files: tuple[str, ...], footers: list[Any], columns: Columns) -> RowGroups:
    rows, sizes, origin, largest = [], [], [], []
    for file, footer in enumerate(footers):
        place = {footer.schema.column(number).path: number for number in range(footer.num_columns)}
        image = place[f"{columns.image}.bytes"] if f"{columns.image}.bytes" in place else place[columns.image]
        read = [image, place[columns.beside]] if columns.beside else [image]
        for number in range(footer.num_row_groups):
            group = footer.row_group(number)
            chunks = [group.column(column) for column in read]
            rows.append(group.num_rows)
            sizes.append(sum(chunk.total_uncompressed_size for chunk in chunks[: 1 + columns.captioned]))
            origin.append((file, number))
            if columns.beside and chunks[1].statistics:
                _check_beside(f"{files[file]}: row group {number}", columns, chunks[1].statistics)
            if not columns.class_names and columns.labelled:
                largest.append(_largest(files[file], columns.beside, chunks[1]) if group.num_rows else 0)
    if not sum(rows):
        raise DatasetError(f"data.path: {url}: its parquet files have no rows")
    kept = np.flatnonzero(rows)
    num_classes = len(columns.class_names)
    if not num_classes and columns.labelled:
        advice = "or let the files' schema declare the classes, as the package datasets writes it"
        places = [f"{files[file]}: row group {number}" for file, number in origin]
        num_classes = num_classes_of(np.array(largest, np.int64)[kept], lambda group: places[kept[group]], advice)
    return RowGroups(
        url=url,
        files=files,
        columns=columns,
        num_classes=num_classes,
        file=np.array(origin, np.int32)[kept, 0],
        number=np.array(origin, np.int32)[kept, 1],
        starts=np.cumsum([0] + [rows[group] for group in kept], dtype=np.int64),
        image_bytes=np.array(sizes, np.int64)[kept],
    )


def _check_label_type(file: str, schema: Any, columns: Columns) -> None:
    """Check that a column of labels is of integers, whatever its metadata say. Raises DatasetError."""
    import pyarrow

    if columns.labelled:
        kind = schema.field(columns.beside).type
        stored = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
        if not pyarrow.types.is_integer(stored):
            raise DatasetError(f"{file}: column {columns.beside!r} is {kind!s:.80}, not integers")


def _check_beside(place: str, columns: Columns, statistics: Any) -> None:
    """Check labels or captions against the footer's statistics, before any is read. Raises DatasetError."""
    if statistics.has_null_count and statistics.null_count:
        raise DatasetError(f"{place}: {statistics.null_count} rows have no {columns.beside!r}")
    if columns.captioned or not statistics.has_min_max:
        return
    if statistics.min < 0:
        raise DatasetError(f"{place}: its smallest {columns.beside!r}, {statistics.min}, is no label")
    if columns.class_names and statistics.max >= len(columns.class_names):
        last = len(columns.class_names) - 1
        raise DatasetError(f"{place}: its largest {columns.beside!r}, {statistics.max}, is not in 0..{last}")


def _largest(file: str, label_column: str, chunk: Any) -> int:
    if chunk.statistics is None or not chunk.statistics.has_min_max:
        raise DatasetError(
            f"{file}: names no classes and does not say the largest {label_column!r} (data.streaming = false finds it)"
        )
    if not isinstance(chunk.statistics.max, int) or not 0 <= chunk.statistics.max < 1 << 62:
        raise DatasetError(f"{file}: its largest {label_column!r}, {chunk.statistics.max!r:.40}, is no label")
    return chunk.statistics.max
