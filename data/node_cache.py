"""Cache folder in which the processes of a machine share tables that are slow to read."""

import fcntl
import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torchtitan.files.durable import is_unfinished, make_folder, replacing
from torchtitan.files.regular import check_regular

NUM_LOCKS = 64
SECONDS_UNFINISHED = 3600.0  # after which who was writing a table is taken for killed

_TABLE = re.compile(r"[0-9a-f]{1,64}\.arrow")
_UNFINISHED_TABLE = re.compile(r"\.[0-9a-f]{1,64}\.arrow\..*")
_MARK = {b"kept by": b"row group cache"}  # in each table: others have tables in their folders, too


class NodeCache:
    """Cache of tables as memory-mapped files, so that processes share their pages; those longest unused go first.

    Nothing else in the folder is removed, or counted.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        """
        Args:
            folder: created if missing. Raises OSError if it cannot be.
            max_bytes: limit of its tables' total size.
        """
        self._folder = folder
        self._max_bytes = max_bytes
        make_folder(folder)

    def get(self, key: str, make: Callable[[], Any], is_current: Callable[[Any], bool] = lambda table: True) -> Any:
        """Get the pyarrow Table of that name, made by the first process that asks while the others wait for it.

        Args:
            key: letters and digits; equal keys stand for equal tables.
            make: called without arguments if the folder lacks it.
            is_current: whether a table that is there may be used; one that may not is made anew.

        Raises:
            OSError: the folder cannot be read or written.
            (and the exceptions of `make`)
        """
        path = self._folder / f"{key}.arrow"
        table = _open(path)
        if table is None or not is_current(table):
            with self._lock(f"lock-{int(key[:4], 16) % NUM_LOCKS:02}"):
                table = _open(path)
                if table is None or not is_current(table):
                    made = make()
                    _write(path, made)
                    with self._lock("lock-size"):
                        self._shrink(keep=path)
                    return _open(path) or made
        return table

    @contextmanager
    def _lock(self, name: str) -> Iterator[None]:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with open(os.open(self._folder / name, flags, 0o666)) as file:  # the lock goes with it, when a process dies too
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _shrink(self, keep: Path) -> None:
        found = [(status.st_mtime_ns, status.st_size, path) for path, status in self._tables()]
        excess = sum(size for _, size, _ in found) - self._max_bytes
        for _, size, path in sorted(found):
            if excess <= 0:
                return
            if path != keep:
                path.unlink(missing_ok=True)  # who has it mapped keeps it
                excess -= size

    def _tables(self) -> Iterator[tuple[Path, os.stat_result]]:
        for path in self._folder.iterdir():
            try:
                status = path.lstat()
                if not stat.S_ISREG(status.st_mode):
                    continue
                if _TABLE.fullmatch(path.name) and _is_marked(path):
                    yield path, status
                elif _UNFINISHED_TABLE.fullmatch(path.name) and is_unfinished(path.name):
                    if time.time() - status.st_mtime > SECONDS_UNFINISHED:
                        path.unlink(missing_ok=True)
            except FileNotFoundError:
                continue


def _open(path: Path) -> Any:
    """Open a table; None if it is missing or damaged."""
    import pyarrow
    from pyarrow import ipc

    try:
        check_regular(path)
        os.utime(path)  # when it was last used
        with ipc.open_file(pyarrow.memory_map(str(path))) as file:
            return file.read_all()
    except (FileNotFoundError, pyarrow.ArrowInvalid):
        return None


def _is_marked(path: Path) -> bool:
    import pyarrow
    from pyarrow import ipc

    try:
        with ipc.open_file(pyarrow.memory_map(str(path))) as file:
            return (file.schema.metadata or {}).items() >= _MARK.items()
    except pyarrow.ArrowInvalid:
        return False


def _write(path: Path, table: Any) -> None:
    from pyarrow import ipc

    marked = table.replace_schema_metadata((table.schema.metadata or {}) | _MARK)
    with replacing(path) as unfinished, ipc.new_file(str(unfinished), marked.schema) as file:
        file.write_table(marked)
