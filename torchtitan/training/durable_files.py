"""New files that outlast a crash: on the disk, or whole in the store, when the call returns."""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from torchtitan.training.remote_path import AnyPath, RemotePath


@contextmanager
def new_file(path: AnyPath) -> Iterator[BinaryIO]:
    """A file to write, on the disk or in the store when the block has ended. Raises OSError."""
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


def sync(folder: Path) -> None:
    """Bring a folder's list of names to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
