"""Images of parquet files with labels or captions, read a row group at a time, with a window of recent row groups."""

import os
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np

from torchtitan.data.base import DatasetError
from torchtitan.data.image_columns import Columns
from torchtitan.data.parquet_files import RowGroups, open_storage
from torchtitan.errors import one_line

PAUSES = (1.0, 4.0, 16.0)  # seconds before a read is tried again
LASTING = (FileNotFoundError, PermissionError, ImportError)


class RowGroupImages:
    """Images, and labels or captions, by row number; each process reads its row groups, and keeps the given number."""

    _storage: Any

    names = None

    def __init__(self, groups: RowGroups, num_kept: int) -> None:
        self.groups = groups
        self._num_kept = num_kept
        self._forget()

    def __len__(self) -> int:
        return int(self.groups.starts[-1])

    def content(self, position: int) -> bytes:
        group, row = self._place(position)
        content = self._group(group).column(0)[row].as_py()
        if content is None:
            raise ValueError("the row has no image (it may store a path in its place)")
        return content

    def label(self, position: int) -> int:
        group, row = self._place(position)
        label = self._group(group).column(1)[row].as_py()
        if label is None or not 0 <= label < self.groups.num_classes:
            raise DatasetError(f"{self.shown(position)}: label {label} is not in 0..{self.groups.num_classes - 1}")
        return label

    def text(self, position: int) -> str | None:
        """Caption of an image as it is stored."""
        group, row = self._place(position)
        return self._group(group).column(1)[row].as_py()

    def shown(self, position: int) -> str:
        group, row = self._place(position)
        return f"{self._described(group)}, row {row}"

    def _place(self, position: int) -> tuple[int, int]:
        group = int(np.searchsorted(self.groups.starts, position, side="right")) - 1
        return group, position - int(self.groups.starts[group])

    def _described(self, group: int) -> str:
        return f"{self.groups.files[self.groups.file[group]]}: row group {self.groups.number[group]}"

    def _group(self, group: int) -> Any:
        if self._process != os.getpid():  # a file system's connections do not outlive a fork
            self._forget()
        if group not in self._kept:
            while len(self._kept) >= self._num_kept:
                self._kept.popitem(last=False)
            self._kept[group] = self._read(group)
        self._kept.move_to_end(group)
        return self._kept[group]

    def _read(self, group: int) -> Any:
        """Read the row group's images and what is beside them, a pyarrow Table of two columns. Raises DatasetError."""
        columns, file = self.groups.columns, int(self.groups.file[group])

        def read() -> Any:
            from pyarrow import parquet

            if self._storage is None:
                self._storage = open_storage(self.groups.url)[0]
            with self._storage.open(self.groups.files[file], "rb") as opened:
                reader = parquet.ParquetFile(opened, metadata=self._footers.get(file), pre_buffer=True)
                self._footers[file] = reader.metadata
                names = [name for name in (columns.image, columns.beside) if name]
                return _plain(reader.read_row_group(int(self.groups.number[group]), columns=names), columns)

        return _try_again(self._described(group), read, is_local=self.groups.url.startswith(("/", "file:")))

    def _forget(self) -> None:
        self._process = os.getpid()
        self._storage = None
        self._footers: dict[int, Any] = {}
        self._kept: OrderedDict[int, Any] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_storage": None, "_footers": {}, "_kept": OrderedDict()}


def _plain(table: Any, columns: Columns) -> Any:
    """Images as large_binary, and labels as int64 or captions as large_string, a pyarrow Table of one array each."""
    import pyarrow
    from pyarrow import compute

    images = table.column(columns.image)
    if pyarrow.types.is_struct(images.type):
        images = compute.struct_field(images, "bytes")
    arrays = {"image": images.cast(pyarrow.large_binary())}  # 64-bit offsets: one array, however large
    if columns.beside:
        name, kind = ("caption", pyarrow.large_string()) if columns.captioned else ("label", pyarrow.int64())
        arrays[name] = table.column(columns.beside).cast(kind)
    return pyarrow.table(arrays).combine_chunks()


def _try_again(place: str, read: Callable[[], Any], is_local: bool) -> Any:
    """Retry a read after a pause where the failure may be temporary: for local files, by the system's error number."""
    import pyarrow

    for pause in (*PAUSES, None):
        try:
            return read()
        except DatasetError:
            raise
        except (*LASTING, pyarrow.ArrowInvalid) as error:  # it will not go away
            raise DatasetError(f"{place} cannot be read ({one_line(error)})") from error
        except Exception as error:  # each store's package has its own
            if is_local and _is_damage(error):
                raise DatasetError(f"{place} cannot be read ({one_line(error)})") from error
            if pause is None:
                tries = len(PAUSES) + 1
                raise DatasetError(f"{place} cannot be read, tried {tries} times ({one_line(error)})") from error
            time.sleep(pause)


def _is_damage(error: Exception) -> bool:
    """Check whether a file was read and is damaged; the package has no kind of error for that."""
    return not isinstance(error, OSError) or (type(error) is OSError and error.errno is None)
