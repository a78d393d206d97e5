"""A checkpoint's folder: its names, its manifest, and what makes it good.

Nothing in it is believed before it is checked: sizes, types, names and links as well as checksums.
"""

import hashlib
import json
import os
import re
import stat
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader

from torchtitan.training.faults import first_line
from torchtitan.training.shard_files import DamagedShard, check_shards

STATE, MANIFEST = "state.json", "manifest.json"
MAX_JSON_BYTES = 64 << 20  # a manifest of 100,000 files has 15 MB; state.json holds counters and short lists

_FOLDER = re.compile(r"step-(\d{8,18})")
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class CheckpointError(Exception):
    """A checkpoint that cannot be written or read; the message is one line."""


class DamagedFile(Exception):
    """A file that is not what it should be; the message says in a few words what is wrong with it."""


def checkpoint_steps(folder: Path) -> list[int]:
    """Steps of the checkpoint folders under `folder`, good or not, newest first."""
    names = (_FOLDER.fullmatch(path.name) for path in folder.iterdir()) if folder.is_dir() else ()
    return sorted((int(match[1]) for match in names if match), reverse=True)


def checkpoint_path(folder: Path, step: int) -> Path:
    """Folder of one step's checkpoint."""
    return folder / f"step-{step:08d}"


def verify(checkpoint: Path) -> str | None:
    """Read every byte of a checkpoint.

    Returns:
        None for a good checkpoint, else in a few words what is wrong with it.
    """
    try:
        files = read_manifest(checkpoint)
        with ThreadPoolExecutor(4) as pool:
            problems = pool.map(lambda name: check_file(checkpoint / name, files[name]), files)
            problem = next((problem for problem in problems if problem), None)
        return problem or check_content(checkpoint, files)
    except DamagedFile as error:
        return str(error)


def check_content(checkpoint: Path, files: dict[str, dict]) -> str | None:
    """What is wrong with a checkpoint, besides the bytes of its files having changed."""
    # The reader takes every shard in the folder, so one that was not verified must not lie there.
    stray = sorted(path.name for path in checkpoint.glob("*.safetensors") if path.name not in files)
    if stray:
        return f"{stray[0]} is not in {MANIFEST}"
    try:
        read_json(checkpoint / STATE, dict)
        check_shards(checkpoint / name for name in sorted(files) if name.endswith(".safetensors"))
    except (DamagedFile, DamagedShard) as error:
        return str(error)
    except OSError as error:
        return f"{Path(error.filename or checkpoint).name} is missing or unreadable"
    return None


def newest_good(folder: Path) -> tuple[int | None, list[str]]:
    """Step of the newest good checkpoint, and one line for each newer one that is damaged."""
    skipped = []
    for step in checkpoint_steps(folder):
        problem = verify(checkpoint_path(folder, step))
        if problem is None:
            return step, skipped
        skipped.append(f"{checkpoint_path(folder, step)}: {problem}; skipped")
    return None, skipped


def read_tensors(checkpoint: Path, tensors: dict[str, Tensor]) -> None:
    """Fill tensors (plain or sharded) in place from a verified checkpoint, by name. Raises CheckpointError."""
    try:
        with _single_process_allowed():
            dcp.load(tensors, storage_reader=HuggingFaceStorageReader(str(checkpoint)))
    except (dcp.CheckpointException, RuntimeError, ValueError, OSError) as error:
        raise CheckpointError(f"{checkpoint}: does not fit this model: {first_line(error)}") from error


def read_state(checkpoint: Path) -> dict:
    """What is not a tensor. Raises CheckpointError."""
    try:
        return read_json(checkpoint / STATE, dict)
    except DamagedFile as error:
        raise CheckpointError(f"{checkpoint}: {error}") from error


# ---------------------------------------------------------------------- manifest


def write_manifest(folder: Path, files: dict[str, dict]) -> None:
    """Complete a folder: name -> {"size", "sha256"} of each file, on the disk when this returns. Raises OSError."""
    text = json.dumps({"files": files, "digest": _digest_of(files)}, indent=1)
    write_synced(folder / MANIFEST, text.encode())
    sync(folder)


def read_manifest(checkpoint: Path) -> dict[str, dict]:
    """File name -> {"size": bytes, "sha256": hex}, checked to be just that. Raises DamagedFile."""
    path = checkpoint / MANIFEST
    if not path.exists() and not path.is_symlink():
        raise DamagedFile(f"{MANIFEST} is missing: the save was cut off")
    manifest = read_json(path, dict)
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


def read_json(path: Path, kind: type, limit: int = MAX_JSON_BYTES) -> Any:
    """The content of a JSON file, whose size and outermost type are checked.

    Raises:
        DamagedFile: missing, a link, larger than `limit` bytes, no JSON, nested too deep, or of another type.
    """
    try:
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode):
            raise DamagedFile(f"{path.name} is damaged: no plain file")
        if status.st_size > limit:
            raise DamagedFile(f"{path.name} is damaged: {status.st_size} bytes, at most {limit} are believed")
        with open(path, "rb") as file:
            content = json.loads(file.read(limit + 1))
    except OSError as error:
        raise DamagedFile(f"{path.name} is missing or unreadable") from error
    except (ValueError, RecursionError) as error:
        raise DamagedFile(f"{path.name} is damaged") from error
    if type(content) is not kind:
        raise DamagedFile(f"{path.name} is damaged")
    return content


def check_file(path: Path, entry: dict) -> str | None:
    """Compare a file with its {"size", "sha256"}; returns what is wrong."""
    try:
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode):
            return f"{path.name} is no plain file"
        if status.st_size != entry["size"]:
            return f"{path.name} has {status.st_size} bytes instead of {entry['size']}"
        return None if hash_file(path) == entry["sha256"] else f"{path.name} is damaged"
    except OSError:
        return f"{path.name} is missing or unreadable"


def hash_file(path: Path) -> str:
    """SHA-256 of what is in a file, as hex."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_back(path: Path, entry: dict) -> None:
    """Make sure that a file just written holds what it should, read from the disk. Raises OSError."""
    if hasattr(os, "posix_fadvise"):
        with open(path, "rb") as file:  # else the answer would come from memory
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if problem := check_file(path, entry):
        raise OSError(f"{problem} right after it was written: the disk is not to be trusted")


def write_synced(path: Path, content: bytes) -> dict:
    """Write a new file and bring it to the disk; returns its {"size", "sha256"}. Raises OSError."""
    with open(path, "xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def sync(folder: Path) -> None:
    """Bring a folder's list of names to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _single_process_allowed() -> Iterator[None]:
    """Without torch's warning that a single process is one."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
