"""Stores of checkpoints, local and remote: how a checkpoint comes to count, and ceases to.

In a local folder it is written under a hidden name and renamed when it is whole. A remote store has no rename: there it
is written in place, and counts by its manifest, which is written last and removed first.
"""

import logging
import os
import re
import uuid
from pathlib import Path

from torchtitan.checkpoint.manifest import (
    MANIFEST,
    checkpoint_path,
    is_checkpoint_file,
    is_checkpoint_folder,
    write_manifest,
)
from torchtitan.checkpoint.owner import OWNER_FILE, read_owner, shown_owner
from torchtitan.errors import first_line
from torchtitan.files.durable import make_folder, sync
from torchtitan.files.ownership import foreign_entry
from torchtitan.files.remote_path import AnyPath, RemotePath
from torchtitan.files.removal import remove_folder

logger = logging.getLogger(__name__)

_SET_ASIDE = re.compile(r"set-aside-step-\d{8,18}-[0-9a-f]{8}")
# Of a save, a replacement or a removal that was cut off.
_HIDDEN = re.compile(r"\.((deleted|replaced)-)?step-\d{8,18}(-[0-9a-f]{8})?")


class LocalStore:
    """Checkpoints in a folder of a file system that renames in one go; used by the first rank, every method raises OSError."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def prepare(self) -> None:
        """Prepare once, when a run starts: remove the remains of an interrupted save."""
        for path in sorted(self._folder.glob(".*")):
            if _HIDDEN.fullmatch(path.name) and _is_own(path):
                self._remove(path)

    def begin(self, step: int) -> str:
        """Begin a checkpoint: name of a new, empty folder for its files."""
        name = f".step-{step:08d}-{_unique()}"
        make_folder(self._folder)
        (self._folder / name).mkdir()
        return name

    def commit(self, name: str, step: int, files: dict[str, dict]) -> None:
        """Commit a folder with all its files as the checkpoint of a step."""
        partial = self._folder / name
        write_manifest(partial, files)
        final = checkpoint_path(self._folder, step)
        replaced: Path | None = None
        if (final / MANIFEST).exists():
            # Only one that does not count is there: a good one would have been resumed from or set aside.
            replaced = self._folder / f".replaced-{final.name}-{_unique()}"
            final.rename(replaced)
        elif os.path.lexists(final):
            kept = self._folder / f"kept-{final.name}-{_unique()}"
            final.rename(kept)
            logger.warning(f"{final}: is no checkpoint; it is kept as {kept.name}")
        partial.rename(final)
        sync(self._folder)
        sync(self._folder.parent)
        if replaced:
            self._remove(replaced)

    def discard(self, name: str) -> None:
        """Discard the files of a failed save, as far as possible."""
        self._remove(self._folder / name)

    def delete(self, step: int) -> None:
        """Delete a checkpoint; at no moment does half of one count."""
        path = checkpoint_path(self._folder, step)
        if not (path / MANIFEST).exists():  # not made here, or somebody is at work on it
            return
        # Renamed first: a delete that is cut off must not leave something that looks like a checkpoint.
        hidden = self._folder / f".deleted-{path.name}-{_unique()}"
        path.rename(hidden)
        self._remove(hidden)

    def set_aside(self, step: int) -> str:
        """Set aside a checkpoint under a name that does not count; return the name."""
        path = checkpoint_path(self._folder, step)
        aside = path.with_name(f"set-aside-{path.name}-{_unique()}")
        path.rename(aside)
        sync(self._folder)
        return aside.name

    def _remove(self, hidden: Path) -> None:
        """Remove a hidden folder, as far as possible; files of others stay, under a visible name."""
        try:
            if remove_folder(hidden, is_checkpoint_file):
                kept = hidden.with_name(f"kept-{hidden.name.lstrip('.')}")
                hidden.rename(kept)
                logger.warning(f"{kept}: holds files that are not a checkpoint's; they are kept")
        except OSError as error:
            logger.warning(f"{hidden}: cannot be removed yet: {first_line(error)}")


class RemoteStore:
    """Checkpoints in a store of whole file names, without guarantees about several of them; methods as of LocalStore."""

    def __init__(self, folder: RemotePath) -> None:
        self._folder = folder
        self._owner: dict | None = None

    def prepare(self) -> None:
        self._owner = read_owner(self._folder)
        for path in self._folder.iterdir():
            own = is_checkpoint_folder(path.name) or _SET_ASIDE.fullmatch(path.name)
            if own and path.is_dir() and not (path / MANIFEST).exists():
                _remove(path)

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
        write_manifest(self._folder / name, files)

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


def store_of(folder: AnyPath) -> LocalStore | RemoteStore:
    """Store that keeps checkpoints in a folder."""
    return RemoteStore(folder) if isinstance(folder, RemotePath) else LocalStore(folder)


def _is_own(folder: Path) -> bool:
    """Check whether a folder of a hidden name is left by a save or a removal: empty, or with a file of a checkpoint."""
    if folder.is_symlink() or not folder.is_dir():
        return False
    names = [path.name for path in folder.iterdir()]
    return not names or any(map(is_checkpoint_file, names))


def foreign_content(folder: AnyPath) -> str | None:
    """Name of a foreign entry in a folder of checkpoints; None if there is none."""
    own = (is_checkpoint_folder, _SET_ASIDE.fullmatch, _HIDDEN.fullmatch, {OWNER_FILE}.__contains__)
    if isinstance(folder, Path) and not folder.exists():  # listing it raises NotADirectoryError below a file
        return None
    return foreign_entry(folder, is_own=lambda path: any(is_own(path.name) for is_own in own))


def _remove(path: RemotePath) -> None:
    """Remove the program's files in a checkpoint's folder, and the folder if it is empty then."""
    (path / MANIFEST).unlink()  # first: what is left of a removal that is cut off must not count
    path.remove_files([file.name for file in path.iterdir() if is_checkpoint_file(file.name) and file.is_file()])
    if left := next(path.iterdir(), None):
        logger.warning(f"{left}: is not a checkpoint's file; it is kept")
    else:
        path.remove_empty()


def _unique() -> str:
    return uuid.uuid4().hex[:8]
