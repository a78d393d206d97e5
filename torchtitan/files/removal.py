"""Removal of the program's own folders; files of others stay."""

import stat
from collections.abc import Callable
from pathlib import Path


def remove_folder(folder: Path, is_own: Callable[[str], bool]) -> list[Path]:
    """Remove a folder's plain files with the program's names, and the folder if it is empty then.

    Links, subfolders, and files of other names stay, and so does the folder then.

    Args:
        folder: the program's by name and surroundings; links are not followed, a missing one counts as removed.
        is_own: whether the program gives files such a name.

    Returns:
        the remaining names, sorted; empty if the folder is gone.

    Raises:
        OSError: a file cannot be removed.
    """
    try:
        if not stat.S_ISDIR(folder.lstat().st_mode):
            return [folder]
    except FileNotFoundError:
        return []
    left = []
    for path in sorted(folder.iterdir()):
        if is_own(path.name) and stat.S_ISREG(path.lstat().st_mode):
            path.unlink(missing_ok=True)
        else:
            left.append(path)
    if not left:
        folder.rmdir()
    return left
