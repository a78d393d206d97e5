"""Regular files of other owners, read with bounds on their size.

A link to a regular file is followed. A pipe would block forever, a device may act on being opened, endless.
"""

import errno
import os
import stat
import tomllib
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

LARGEST_RECORD = 64 << 20  # bytes of a file of settings or results
_KINDS = {
    stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}  # fmt: skip


def user_path(path: str | Path) -> Path:
    """Expand `~` and `~name` in a path given by a user; that of an unknown user stays unchanged."""
    return Path(os.path.expanduser(path))


class UnsuitableFile(OSError):
    """File that is not regular, or larger than allowed; a retry would find the same."""


def check_regular(path: str | bytes | Path) -> os.stat_result:
    """Check for a regular file, or a link to one, unopened. Raises UnsuitableFile, OSError: missing or out of reach."""
    status = os.stat(path)
    _refuse_special(status, path)
    return status


def open_regular(path: str | bytes | Path) -> BinaryIO:
    """Open a regular file, or a link to one, for reading. Raises as `check_regular`."""
    check_regular(path)
    return open(path, "rb")


def read_regular(path: str | bytes | Path, limit: int = LARGEST_RECORD) -> bytes:
    """Read a regular file, or a link to one, of at most `limit` bytes. Raises UnsuitableFile, or another OSError."""
    size = check_regular(path).st_size
    if size <= limit:
        with open(path, "rb") as file:
            content = file.read(size + 1 if size else limit + 1)  # files of the system say that they are empty
            size = len(content)
    if size > limit:
        raise UnsuitableFile(errno.EFBIG, f"{size:,} bytes, more than {limit:,}", path)
    return content


def read_text(path: str | bytes | Path, limit: int = LARGEST_RECORD) -> str:
    """Read a regular file of UTF-8 text, with or without a byte order mark; lines end in `\\n`.

    Raises:
        UnicodeDecodeError: it is no such text; otherwise as `read_regular`.
    """
    return read_regular(path, limit).decode("utf-8-sig").replace("\r\n", "\n")


def read_toml(path: str | bytes | Path, limit: int = LARGEST_RECORD) -> dict[str, Any]:
    """Read a TOML file. Raises as `read_text`; ValueError too: it is no TOML, or nested too deeply."""
    try:
        return tomllib.loads(read_text(path, limit))
    except RecursionError:
        raise ValueError("nested too deeply") from None


def refuse_special(path: Path) -> None:
    """Check that a path to be replaced is no pipe, socket, device or folder. Raises UnsuitableFile."""
    with suppress(FileNotFoundError, NotADirectoryError):
        status = path.lstat()
        if not stat.S_ISLNK(status.st_mode):
            _refuse_special(status, path)


def refuse_other_than_file(path: Path) -> None:
    """Check that a path of the program's own is a plain file, no link, or missing. Raises UnsuitableFile, OSError."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return
    if stat.S_ISLNK(status.st_mode):
        raise UnsuitableFile(errno.ELOOP, "is a link, not a regular file", path)
    _refuse_special(status, path)


def _refuse_special(status: os.stat_result, path: str | bytes | Path) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "of an unknown kind")
        raise UnsuitableFile(errno.EINVAL, f"is {kind}, not a regular file", path)
