"""What archives hold, kept in a file for each of them, so that an archive is read through once only."""

import hashlib
import json
import logging
import os
import secrets
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from tqdm import tqdm

from data.base import DatasetError

logger = logging.getLogger(__name__)

Table = dict[str, np.ndarray]
Advance = Callable[[int], object]


def saved_tables(
    archives: Sequence[Path], kind: str, build: Callable[[Path, Advance], Table], folder: str = ""
) -> list[Table]:
    """The table of each archive: from its index file where that is as new as the archive, or else built and saved.

    An interruption loses the archive that was being read, no more.

    Args:
        archives: files.
        kind: what else the tables depend on; an index of another kind is not used.
        build: makes an archive's table; calls its second argument with the number of bytes it has gone on.
        folder: where index files are kept; "": each beside its archive, hidden, or nowhere if that cannot be written.

    Raises:
        DatasetError: an archive cannot be read, or `folder` not be written.
        (and whatever `build` raises)
    """
    tables = {path: _load(_index_file(path, folder), _mark(path, kind)) for path in archives}
    missing = [path for path in archives if tables[path] is None]
    unsaved = None
    total = sum(path.stat().st_size for path in missing)
    with tqdm(total=total, unit="B", unit_scale=True, desc="reading through archives", delay=2) as bar:
        for path in missing:
            mark = _mark(path, kind)  # before reading: what is written meanwhile makes the index old
            tables[path] = build(path, bar.update)
            try:
                _save(_index_file(path, folder), mark, tables[path])
            except OSError as error:
                unsaved = error
                if folder:
                    raise DatasetError(f"data.index_path: {folder}: cannot be written: {error.strerror}") from error
    if unsaved is not None:
        logger.warning(
            f"{missing[0].parent}: what its archives hold cannot be kept beside them ({unsaved.strerror}), so every "
            "process reads them through; data.index_path names a folder to keep it in"
        )
    return [tables[path] for path in archives]


def _index_file(archive: Path, folder: str) -> Path:
    if not folder:
        return archive.parent / f".{archive.name}.index"
    place = hashlib.sha256(os.fsencode(archive.absolute())).hexdigest()[:16]
    return Path(folder).expanduser() / f"{archive.name}.{place}.index"


def _mark(archive: Path, kind: str) -> dict[str, str]:
    try:
        status = archive.stat()
    except OSError as error:
        raise DatasetError(f"{archive}: cannot be read: {error.strerror}") from error
    return {"kind": kind, "size": str(status.st_size), "modified": str(status.st_mtime_ns)}


def _load(path: Path, mark: dict[str, str]) -> Table | None:
    """None where there is no index of that mark, or a damaged one."""
    try:
        with safe_open(path, framework="np") as file:
            metadata = file.metadata() or {}
            if {key: metadata.get(key) for key in mark} != mark:
                return None
            table = {name: file.get_tensor(name) for name in file.keys()}
    except (OSError, SafetensorError):
        return None
    return table if metadata.get("crc32") == _checksum(table) else None


def _save(path: Path, mark: dict[str, str], table: Table) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    try:
        unfinished.touch()  # the library's own error is of another kind
        save_file(table, unfinished, metadata=mark | {"crc32": _checksum(table)})
        os.replace(unfinished, path)
    except SafetensorError as error:
        raise OSError(0, " ".join(str(error).split())) from error
    finally:
        unfinished.unlink(missing_ok=True)


def _checksum(table: Table) -> str:
    crcs = {name: zlib.crc32(np.ascontiguousarray(array)) for name, array in table.items()}
    return str(zlib.crc32(json.dumps(crcs, sort_keys=True).encode()))
