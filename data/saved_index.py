"""Saved indexes of archives, one file each, so that an archive is scanned only once."""

import errno
import hashlib
import json
import logging
import os
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from tqdm import tqdm

from torchtitan.data.base import DatasetError
from torchtitan.errors import unwrapped
from torchtitan.files.durable import make_folder, replacing
from torchtitan.files.regular import open_regular, user_path

_MOST_HEADER_BYTES = 1 << 16

logger = logging.getLogger(__name__)

Table = dict[str, np.ndarray]
Advance = Callable[[int], object]


def saved_tables(
    archives: Sequence[Path], kind: str, build: Callable[[Path, Advance], Table], folder: str = ""
) -> list[Table]:
    """Tables of the archives: from the index file if it is as new as the archive, or else built and saved.

    An interruption loses only the archive being read.

    Args:
        archives: files.
        kind: of the tables; an index of another kind is not used.
        build: makes an archive's table; calls its second argument with the number of bytes read since the last call.
        folder: of the index files; "": each in its archive's folder, hidden, or nowhere if that cannot be written.

    Raises:
        DatasetError: an archive cannot be read, or `folder` not be written.
        (and the exceptions of `build`)
    """
    tables = {path: _load(_index_file(path, folder), _mark(path, kind)) for path in archives}
    missing = [path for path in archives if tables[path] is None]
    unsaved = None
    total = sum(path.stat().st_size for path in missing)
    with tqdm(total=total, unit="B", unit_scale=True, desc="reading through archives", delay=2) as bar:
        for path in missing:
            mark = _mark(path, kind)  # before reading: what is written meanwhile makes the index old
            table = tables[path] = build(path, bar.update)
            try:
                _save(_index_file(path, folder), mark, table)
            except OSError as error:
                unsaved = error
                if folder:
                    raise DatasetError(f"data.index_path: {folder}: cannot be written: {error.strerror}") from error
    if unsaved is not None:
        logger.warning(
            f"{missing[0].parent}: the index of its archives cannot be saved "
            f"there ({unsaved.strerror}), so every process scans them; "
            "set data.index_path to a folder for it"
        )
    return [found for path in archives if (found := tables[path]) is not None]


def _index_file(archive: Path, folder: str) -> Path:
    if not folder:
        return archive.parent / f".{archive.name}.index"
    place = hashlib.sha256(os.fsencode(archive.absolute())).hexdigest()[:16]
    return user_path(folder) / f"{archive.name}.{place}.index"


def _mark(archive: Path, kind: str) -> dict[str, str]:
    try:
        status = archive.stat()
    except OSError as error:
        raise DatasetError(f"{archive}: cannot be read: {error.strerror}") from error
    return {"kind": kind, "size": str(status.st_size), "modified": str(status.st_mtime_ns)}


def _load(path: Path, mark: dict[str, str]) -> Table | None:
    """Load an index; None if there is none of that mark, or a damaged one."""
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="np") as file:
            metadata = file.metadata() or {}
            if {key: metadata.get(key) for key in mark} != mark:
                return None
            table = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (a file is no mapping)
    except (OSError, SafetensorError):
        return None
    return table if metadata.get("crc32") == _checksum(table) else None


def _save(path: Path, mark: dict[str, str], table: Table) -> None:
    make_folder(path.parent)
    if not _may_replace(path):
        raise OSError(errno.EEXIST, f"{path} is no index of this program (move it away)")
    try:
        with replacing(path) as unfinished:
            unfinished.touch()  # the library's own error is of another kind
            save_file(table, unfinished, metadata=mark | {"crc32": _checksum(table)})
    except SafetensorError as error:
        raise OSError(errno.EIO, unwrapped(error)) from error


def _may_replace(path: Path) -> bool:
    """Check whether the place is free, or holds an empty file or an index, good or damaged, by its header's marks."""
    if not os.path.lexists(path):
        return True
    with open_regular(path) as file:
        header = file.read(_MOST_HEADER_BYTES)
    return not header or all(mark in header for mark in (b"__metadata__", b"crc32", b"modified"))


def _checksum(table: Table) -> str:
    crcs = {name: zlib.crc32(np.ascontiguousarray(array).data) for name, array in table.items()}
    return str(zlib.crc32(json.dumps(crcs, sort_keys=True).encode()))
