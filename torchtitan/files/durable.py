"""Durable files: content and name are on the disk, or whole in the store, when a call returns.

A replaced file always holds the old content or the new one, never a part: the new content is written under a hidden
name in the same folder, brought to the disk, and renamed.
"""

import errno
import hashlib
import os
import re
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from torchtitan.files.regular import refuse_special
from torchtitan.files.remote_path import AnyPath, RemotePath

_UNFINISHED = re.compile(r"\..+\.[0-9a-f]{32}\.unfinished")


@contextmanager
def new_file(path: AnyPath) -> Iterator[BinaryIO]:
    """Open a new file for writing; it is on the disk or in the store when the block has ended. Raises OSError."""
    if isinstance(path, RemotePath):
        with path.open("wb") as file:
            yield file
        return
    with open(path, "xb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def write_synced(path: AnyPath, content: bytes) -> dict:
    """Write a new file; returns its {"size", "sha256"}. Raises OSError."""
    if isinstance(path, RemotePath):
        path.write_bytes(content)
    else:
        with new_file(path) as file:
            file.write(content)
    return {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Replace a file: yield a hidden path for its whole new content, renamed to `path` when the block succeeds.

    For libraries that write to a path. They must be given the format, since the hidden name has another ending. A link
    itself is replaced, not its target.

    Raises:
        OSError: it cannot be brought to the disk, or is a pipe, a device or a folder; `path` is unchanged.
    """
    refuse_special(path)
    unfinished = unfinished_path(path)
    try:
        yield unfinished
        follow_umask(unfinished)
        sync(unfinished)
        unfinished.replace(path)
    except BaseException:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise
    sync(path.parent)


def follow_umask(path: Path) -> None:
    """Give a new file the mode of `open`, as some libraries write for their owner alone. Raises OSError."""
    umask = os.umask(0o077)  # there is no other way to read it; a file that another thread opens meanwhile is private
    os.umask(umask)
    mode = path.stat().st_mode
    if stat.S_ISREG(mode) and stat.S_IMODE(mode) == 0o600:
        path.chmod(0o666 & ~umask)


def replace_file(path: Path, content: bytes | str) -> None:
    """Replace a file's content by this (text as UTF-8), or create the file. Raises OSError."""
    with replacing(path) as unfinished, open(unfinished, "xb") as file:
        file.write(content.encode() if isinstance(content, str) else content)


def append_synced(path: Path, content: bytes) -> None:
    """Append to a file, which is created if missing; all of it is on the disk when this returns.

    Raises:
        OSError: the disk is full or fails; the file is cut back to its old length, if the disk allows.
    """
    there = path.exists()
    with open(path, "ab", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        try:
            if file.write(content) < len(content):  # the rest would not have fitted
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            os.fsync(file.fileno())
        except OSError:
            with suppress(OSError):
                file.truncate(size)
            raise
    if not there:
        sync(path.parent)


def make_folder(path: Path) -> None:
    """Make a folder and its parents, if they are missing. Raises OSError."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync(folder.parent)


def sync(path: Path) -> None:
    """Sync a file's content, or a folder's list of names, to the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems know no sync of a folder.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP) or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def is_unfinished(name: str) -> bool:
    """Check whether a name is that of an unfinished file of `replacing`."""
    return _UNFINISHED.fullmatch(name) is not None


def remove_unfinished(folder: Path) -> None:
    """Remove unfinished files of `replacing` in a folder of the program's own, after a kill; not in subfolders."""
    for path in folder.glob(".*.unfinished"):
        if is_unfinished(path.name) and path.is_file() and not path.is_symlink():
            path.unlink(missing_ok=True)


def unfinished_path(path: Path) -> Path:
    """Hidden name, of no other file, beside a path."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}.unfinished")
