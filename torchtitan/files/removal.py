"""Removal of folders that the program has made: nothing that may be somebody else's goes."""

import stat
from collections.abc import Callable
from pathlib import Path


def remove_folder(folder: Path, is_own: Callable[[str], bool]) -> list[Path]:
    """Remove a folder's plain files that bear the program's names, and the folder if nothing else is in it.

    Nothing happens to links, folders within, and files of other names: they stay, and so does the folder.

    Args:
        folder: it must be known as the program's own by its name and by what surrounds it; a link is not followed, and a
            folder that is missing counts as removed.
        is_own: whether the program gives files such a name.

    Returns:
        what was left, sorted; empty if the folder is gone.

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
