"""Which folders and files are the program's own: known by a name together with what the content begins with."""

import errno
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from torchtitan.files.durable import is_unfinished

LOCK_FILE = ".lock"


def is_foreign(folder: Path, marks: Mapping[str, bytes]) -> bool:
    """Whether a folder holds something, but none of the program's marks.

    A lock and an unfinished file are no sign of somebody else's: a kill may have left them before the mark was written.

    Args:
        folder: to be written to; one that is missing is nobody's.
        marks: name of a plain file, one of which the program writes before anything else -> what it begins with.

    Raises:
        OSError: it is no folder, or cannot be read.
    """
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return False
    if any(begins_with(folder / name, start) for name, start in marks.items() if name in names):
        return False
    return any(name != LOCK_FILE and not is_unfinished(name) for name in names)


def refuse_foreign_file(path: Path, start: bytes) -> None:
    """Make sure that writing to a path replaces nothing but a plain file of the program's, which begins so.

    Raises:
        OSError: something else is there.
    """
    if os.path.lexists(path) and not begins_with(path, start):
        raise FileExistsError(errno.EEXIST, "there is a file that this command did not write (move it away)", str(path))


def begins_with(path: Path, start: bytes) -> bool:
    """Whether something is a plain file, and no link, that begins so. Raises OSError."""
    if not stat.S_ISREG(path.lstat().st_mode):
        return False
    with open(path, "rb") as file:
        return file.read(len(start)) == start
