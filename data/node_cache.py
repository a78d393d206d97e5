"""A folder in which the processes of a machine share tables that are slow to get."""

import fcntl
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NUM_LOCKS = 64


class NodeCache:
    """Tables as files, memory-mapped, so that processes share their pages; those longest unused go first."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        """
        Args:
            folder: made if need be. Raises OSError where it cannot be.
            max_bytes: of its tables together.
        """
        self._folder = folder
        self._max_bytes = max_bytes
        folder.mkdir(parents=True, exist_ok=True)

    def get(self, key: str, make: Callable[[], Any]) -> Any:
        """The pyarrow Table of that name, made by the first process that asks while the others wait for it.

        Args:
            key: letters and digits; equal keys stand for equal tables.
            make: called without arguments where the folder does not have it.

        Raises:
            OSError: the folder cannot be read or written.
            (and whatever `make` raises)
        """
        path = self._folder / f"{key}.arrow"
        table = _open(path)
        if table is None:
            with self._lock(f"lock-{int(key[:4], 16) % NUM_LOCKS:02}"):
                table = _open(path)
                if table is None:
                    made = make()
                    _write(path, made)
                    with self._lock("lock-size"):
                        self._shrink(keep=path)
                    return _open(path) or made
        return table

    @contextmanager
    def _lock(self, name: str) -> Iterator[None]:
        with open(self._folder / name, "w") as file:  # the lock goes with the descriptor, also when a process dies
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
        for path in self._folder.glob("*.arrow"):
            try:
                yield path, path.stat()
            except FileNotFoundError:
                continue


def _open(path: Path) -> Any:
    """None where there is none, or a damaged one."""
    import pyarrow
    from pyarrow import ipc

    try:
        os.utime(path)  # when it was last used
        with ipc.open_file(pyarrow.memory_map(str(path))) as file:
            return file.read_all()
    except (FileNotFoundError, pyarrow.ArrowInvalid):
        return None


def _write(path: Path, table: Any) -> None:
    from pyarrow import ipc

    unfinished = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    try:
        with ipc.new_file(str(unfinished), table.schema) as file:
            file.write_table(table)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
