"""Manifest of a checkpoint's folder: its names, sizes and checksums, and what they are compared with.

Nothing in it is trusted before it is checked: sizes, types, names and links as well as checksums.
"""

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterable
from io import BufferedReader
from pathlib import Path
from typing import Any, TypeVar, cast

from torchtitan.errors import DamagedFile, StoreError
from torchtitan.files.durable import sync, write_synced
from torchtitan.files.remote_path import AnyPath, RemotePath
from torchtitan.files.shard_headers import DamagedShard, check_shards

STATE, MANIFEST = "state.json", "manifest.json"
RENAMED = "is a checkpoint under another name than its step's (rename it to step- and eight digits, as step-00000100)"
MAX_JSON_BYTES = 64 << 20  # a manifest of 100,000 files has 15 MB; state.json holds counters and short lists

_Folder = TypeVar("_Folder", Path, RemotePath, AnyPath)

_FOLDER = re.compile(r"step-(\d{8,18})")
_WRITTEN = re.compile(r"shard-\d{5,}\.safetensors|" + re.escape(STATE) + "|" + re.escape(MANIFEST))
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


def checkpoint_steps(folder: AnyPath) -> list[int]:
    """Steps of the checkpoint folders under `folder`, good or not, newest first; in a store, those with a manifest."""
    found = [path for path in folder.iterdir() if _FOLDER.fullmatch(path.name)] if folder.is_dir() else []
    if isinstance(folder, RemotePath):  # without one, a save is under way or was cut off
        found = [path for path in found if (path / MANIFEST).exists()]
    return sorted((int(path.name.removeprefix("step-")) for path in found), reverse=True)


def checkpoint_path(folder: _Folder, step: int) -> _Folder:
    """Folder of one step's checkpoint."""
    return folder / f"step-{step:08d}"


def is_checkpoint_file(name: str) -> bool:
    """Check whether a file of this name belongs to a checkpoint's folder: nothing else in it is ever removed."""
    return _WRITTEN.fullmatch(name) is not None


def is_checkpoint_folder(name: str) -> bool:
    """Check whether this is the name of a step's folder, which counts as a checkpoint if it is good."""
    return _FOLDER.fullmatch(name) is not None


def glance(checkpoint: AnyPath) -> str | None:
    """Problem of a checkpoint by its manifest and, on local disks, its files' sizes. Raises StoreError: no answer."""
    try:
        files = read_manifest(checkpoint)
    except DamagedFile as error:
        return str(error)
    if isinstance(checkpoint, Path):
        for name, entry in files.items():
            try:
                size = (checkpoint / name).lstat().st_size
            except OSError:
                return f"{name} is missing or unreadable"
            if size != entry["size"]:
                return f"{name} has {size} bytes instead of {entry['size']}"
    return None


def check_content(checkpoint: AnyPath, files: dict[str, dict]) -> str | None:
    """Check a checkpoint's content, except the bytes of its files and the pieces in its shards; return the problem."""
    # The reader takes every shard in the folder, so one that was not verified must not lie there.
    stray = sorted(path.name for path in checkpoint.glob("*.safetensors") if path.name not in files)
    if stray:
        return f"{stray[0]} is not in {MANIFEST}"
    try:
        read_json(checkpoint / STATE, dict)
    except DamagedFile as error:
        return str(error)
    return None


def check_pieces(checkpoint: AnyPath, files: Iterable[str]) -> str | None:
    """Check the headers of the shards among files, and that their pieces fill each tensor once; return the problem."""
    try:
        check_shards([checkpoint / name for name in sorted(files) if name.endswith(".safetensors")])
    except DamagedShard as error:
        return str(error)
    except StoreError:
        raise
    except OSError as error:
        return f"{Path(str(error.filename or checkpoint)).name} is missing or unreadable"
    return None


# ---------------------------------------------------------------------- manifest


def write_manifest(folder: AnyPath, files: dict[str, dict]) -> None:
    """Write and read back the manifest, which completes a folder: file name -> {"size", "sha256"}. Raises OSError."""
    text = json.dumps({"files": files, "digest": _digest_of(files)}, indent=1)
    entry = write_synced(folder / MANIFEST, text.encode())
    if isinstance(folder, Path):
        sync(folder)
    read_back(folder / MANIFEST, entry)


def read_manifest(checkpoint: AnyPath) -> dict[str, dict]:
    """Read the manifest: file name -> {"size": bytes, "sha256": hex}, checked to be just that. Raises DamagedFile."""
    path = checkpoint / MANIFEST
    try:
        manifest = read_json(path, dict)
    except DamagedFile as error:
        if isinstance(error.__cause__, FileNotFoundError):
            raise DamagedFile(f"{MANIFEST} is missing: the save was cut off") from error
        raise
    files = manifest.get("files")
    if type(files) is not dict or STATE not in files or not all(map(_is_entry, files.items())):
        raise DamagedFile(f"{MANIFEST} is damaged")
    if manifest.get("digest") != _digest_of(files):
        raise DamagedFile(f"{MANIFEST} is damaged")
    return files


def _is_entry(item: tuple[str, Any]) -> bool:
    name, entry = item
    return (
        _FILE.fullmatch(name) is not None
        and name != MANIFEST
        and type(entry) is dict
        and entry.keys() == {"size", "sha256"}
        and type(entry["size"]) is int
        and type(entry["sha256"]) is str
        and _SHA256.fullmatch(entry["sha256"]) is not None
    )


def _digest_of(files: dict) -> str:
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


# ---------------------------------------------------------------------- files


def read_json(path: AnyPath, kind: type, limit: int = MAX_JSON_BYTES) -> Any:
    """Read a JSON file, with its size and outermost type checked.

    Raises:
        DamagedFile: missing, a link, larger than `limit` bytes, no JSON, nested too deep, or of another type.
    """
    try:
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode):
            raise DamagedFile(f"{path.name} is damaged: no plain file")
        if status.st_size > limit:
            raise DamagedFile(f"{path.name} is damaged: {status.st_size} bytes, at most {limit} are believed")
        with path.open("rb") as file:
            content = json.loads(file.read(limit + 1))
    except StoreError:
        raise
    except OSError as error:
        raise DamagedFile(f"{path.name} is missing or unreadable") from error
    except (ValueError, RecursionError) as error:
        raise DamagedFile(f"{path.name} is damaged") from error
    if type(content) is not kind:
        raise DamagedFile(f"{path.name} is damaged")
    return content


def check_file(path: AnyPath, entry: dict) -> str | None:
    """Compare a file with its {"size", "sha256"}; return the problem."""
    try:
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode):
            return f"{path.name} is no plain file"
        if status.st_size != entry["size"]:
            return f"{path.name} has {status.st_size} bytes instead of {entry['size']}"
        return None if hash_file(path) == entry["sha256"] else f"{path.name} is damaged"
    except StoreError:
        raise
    except OSError:
        return f"{path.name} is missing or unreadable"


def hash_file(path: AnyPath) -> str:
    """SHA-256 of a file's content, as hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(cast(BufferedReader, file), "sha256").hexdigest()


def read_back(path: AnyPath, entry: dict) -> None:
    """Read back a file just written and check its content. Raises OSError."""
    if isinstance(path, Path) and hasattr(os, "posix_fadvise"):
        with open(path, "rb") as file:  # else the answer would come from memory
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if problem := check_file(path, entry):
        raise OSError(f"{problem} right after it was written: the disk or store is not to be trusted")
