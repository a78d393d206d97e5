"""The two ways in which a checkpoint comes to count, and ceases to.

In a folder of this machine it is written under a hidden name and renamed when it is whole. A remote store has no rename:
there it is written in its place, and the manifest, written last and removed first, is what makes it count.
"""

import logging
import re
import shutil
import uuid
from pathlib import Path
from typing import Protocol

from torchtitan.training.checkpoint_errors import DamagedFile
from torchtitan.training.checkpoint_files import MANIFEST, checkpoint_path, read_manifest, write_manifest
from torchtitan.training.checkpoint_owner import read_owner, shown_owner
from torchtitan.files.durable import sync
from torchtitan.training.faults import first_line
from torchtitan.training.remote_path import AnyPath, RemotePath

logger = logging.getLogger(__name__)

_OURS = re.compile(r"(set-aside-)?step-\d{8,18}(-[0-9a-f]{8})?")


class CheckpointStore(Protocol):
    """What the first rank does with a run's checkpoints; every method raises OSError."""

    def prepare(self) -> None:
        """Once, when a run starts: remove what a save that was cut off has left."""

    def begin(self, step: int) -> str:
        """Name of a new, empty folder to write a checkpoint's files into."""

    def commit(self, name: str, step: int, files: dict[str, dict]) -> None:
        """Let a folder with all its files count as the checkpoint of a step."""

    def discard(self, name: str) -> None:
        """Remove what a save that failed has written; as much of it as goes."""

    def delete(self, step: int) -> None:
        """Remove a checkpoint; at no moment is there half of one that counts."""

    def set_aside(self, step: int) -> str:
        """Keep a checkpoint under a name that does not count; returns it."""


def store_of(folder: AnyPath) -> CheckpointStore:
    """The store that keeps checkpoints in a folder."""
    return RemoteStore(folder) if isinstance(folder, RemotePath) else LocalStore(folder)


class LocalStore:
    """Checkpoints in a folder of a file system that renames in one go."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def prepare(self) -> None:
        if self._folder.is_dir():
            for path in self._folder.glob(".*"):
                shutil.rmtree(path, ignore_errors=True)

    def begin(self, step: int) -> str:
        name = f".step-{step:08d}-{_unique()}"
        (self._folder / name).mkdir(parents=True)
        return name

    def commit(self, name: str, step: int, files: dict[str, dict]) -> None:
        partial = self._folder / name
        write_manifest(partial, files)
        final, replaced = checkpoint_path(self._folder, step), None
        if final.exists():
            # Only one that does not count is there: a good one would have been resumed from or set aside.
            replaced = self._folder / f".replaced-{final.name}-{_unique()}"
            final.rename(replaced)
        partial.rename(final)
        sync(self._folder)
        sync(self._folder.parent)
        if replaced:
            shutil.rmtree(replaced, ignore_errors=True)

    def discard(self, name: str) -> None:
        shutil.rmtree(self._folder / name, ignore_errors=True)

    def delete(self, step: int) -> None:
        path = checkpoint_path(self._folder, step)
        # Renamed first: a delete that is cut off must not leave something that looks like a checkpoint.
        hidden = self._folder / f".deleted-{path.name}-{_unique()}"
        path.rename(hidden)
        shutil.rmtree(hidden, ignore_errors=True)

    def set_aside(self, step: int) -> str:
        path = checkpoint_path(self._folder, step)
        aside = path.with_name(f"set-aside-{path.name}-{_unique()}")
        path.rename(aside)
        return aside.name


class RemoteStore:
    """Checkpoints in a store that knows files by their whole names, and promises nothing about several of them."""

    def __init__(self, folder: RemotePath) -> None:
        self._folder = folder
        self._owner: dict | None = None

    def prepare(self) -> None:
        self._owner = read_owner(self._folder)
        for path in self._folder.iterdir():
            if _OURS.fullmatch(path.name) and path.is_dir() and not (path / MANIFEST).exists():
                path.remove_tree()

    def begin(self, step: int) -> str:
        # Another launch of the run, on another machine, holds no lock that is seen from here.
        if self._owner is not None and (now := read_owner(self._folder)) != self._owner:
            raise OSError(f"another launch of this run has taken the folder over: {shown_owner(now)}")
        path = checkpoint_path(self._folder, step)
        # Only one that does not count is there: a good one would have been resumed from or set aside.
        _remove(path)
        (path / MANIFEST).make_parents()
        return path.name

    def commit(self, name: str, step: int, files: dict[str, dict]) -> None:
        path = self._folder / name
        write_manifest(path, files)
        try:
            if read_manifest(path) == files:
                return
        except DamagedFile as error:
            raise OSError(f"{error} right after it was written: {self._folder} is not to be trusted") from error
        raise OSError(f"{MANIFEST} is another than the one just written: {self._folder} is not to be trusted")

    def discard(self, name: str) -> None:
        try:
            _remove(self._folder / name)
        except OSError as error:
            logger.warning(f"{self._folder / name}: could not be cleaned up yet: {first_line(error)}")

    def delete(self, step: int) -> None:
        _remove(checkpoint_path(self._folder, step))

    def set_aside(self, step: int) -> str:
        path = checkpoint_path(self._folder, step)
        aside = self._folder / f"set-aside-{path.name}-{_unique()}"
        for source in sorted(path.iterdir(), key=lambda file: file.name == MANIFEST):  # the manifest last
            source.copy_to(aside / source.name)
        _remove(path)
        return aside.name


def _remove(path: RemotePath) -> None:
    (path / MANIFEST).unlink()  # first: what is left of a removal that is cut off must not count
    path.remove_tree()


def _unique() -> str:
    return uuid.uuid4().hex[:8]
