"""Ownership of folders and files by the program: known by a name together with the first bytes."""

import errno
import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torchtitan.files.durable import is_unfinished
from torchtitan.files.remote_path import AnyPath

LOCK_FILE = ".lock"


def foreign_entry(
    folder: AnyPath, marks: Mapping[str, bytes] = MappingProxyType({}), is_own: Callable[[Any], bool] = lambda path: False
) -> str | None:
    """Name of something in a folder that the program did not put there; None in one that it may write to.

    A folder with a mark of the program may hold anything else. A lock and an unfinished file are no sign of somebody
    else's: a kill may have left them before the mark was written.

    Args:
        folder: to be written to; one that is missing is nobody's.
        marks: name of a plain file, one of which the program writes before anything else -> what it begins with.
        is_own: whether a path in a folder without a mark is the program's.

    Raises:
        OSError: it is no folder, or cannot be read.
    """
    try:
        paths: list[Any] = sorted(folder.iterdir(), key=lambda path: path.name)
    except FileNotFoundError:
        return None
    if any(begins_with(path, marks[path.name]) for path in paths if path.name in marks):
        return None
    mine = (path.name == LOCK_FILE or is_unfinished(path.name) or is_own(path) for path in paths)
    return next((path.name for path, own in zip(paths, mine, strict=True) if not own), None)


def foreign_text(folder: AnyPath, name: str, owner: str, advice: str) -> str:
    """Refusal of a folder that holds something foreign.

    Args:
        folder, name: as `foreign_entry` was given and has found.
        owner: whose folder it should be, as "a run's".
        advice: what else to give.
    """
    return f"{folder}: holds {name}, which is not {owner}; nothing was written ({advice})"


def refuse_foreign_file(path: Path, start: bytes) -> None:
    """Refuse a path that holds anything but a plain file of the program's, which begins so. Raises OSError."""
    if os.path.lexists(path) and not begins_with(path, start):
        found = "is a folder; move it away" if path.is_dir() else "there is a file that this command did not write; move it away"
        raise FileExistsError(errno.EEXIST, found, str(path))


def begins_with(path: Path, start: bytes) -> bool:
    """Check whether an entry is a plain file, and no link, that begins so. Raises OSError."""
    if not stat.S_ISREG(path.lstat().st_mode):
        return False
    with open(path, "rb") as file:
        return file.read(len(start)) == start
