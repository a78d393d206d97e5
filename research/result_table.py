"""Table of a study: a row per finished cell, whole and on the disk as soon as it is added."""

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchtitan.experiments.folder import StudyError
from torchtitan.experiments.record import drop_torn_line
from torchtitan.files.durable import append_synced, replace_file
from torchtitan.files.regular import read_regular

_LARGEST_TABLE = 1 << 28  # bytes


class ResultTable:
    """dict[str, Any]s by key, appended one at a time; of two rows with one key, the later counts."""

    def __init__(self, path: Path, columns: Sequence[str], key: Sequence[str]) -> None:
        """Read the file, if it exists. Raises StudyError: it is no such table."""
        self.path = path
        self._columns = list(columns)
        self._key = list(key)
        self._rows: dict[tuple[str, ...], dict[str, str]] = {}
        self._begun = False
        if path.exists():
            self._read()

    def __len__(self) -> int:
        return len(self._rows)

    def find(self, cell: dict[str, Any]) -> dict[str, str] | None:
        """Find the row of a cell, if it has one."""
        return self._rows.get(self._key_of(cell))

    def add(self, cell: dict[str, Any]) -> dict[str, str]:
        """Append a row, on the disk when this returns."""
        row = {name: as_text(cell.get(name)) for name in self._columns}
        self.begin()
        buffer = io.StringIO(newline="")
        csv.DictWriter(buffer, self._columns, lineterminator="\n").writerow(row)
        append_synced(self.path, buffer.getvalue().encode())
        self._rows[self._key_of(row)] = row
        return row

    def begin(self) -> None:
        """Write the header if there is none yet, which marks the folder as the study's. Raises OSError."""
        if not self._begun:
            replace_file(self.path, self._header)
            self._begun = True

    def _read(self) -> None:
        try:
            content = read_regular(self.path, _LARGEST_TABLE)
        except OSError as error:
            raise StudyError(f"{self.path}: cannot be read: {error.strerror}") from error
        whole = content[: content.rfind(b"\n") + 1]
        reader = csv.DictReader(io.StringIO(whole.decode("utf-8", errors="replace"), newline=""))
        if not (reader.fieldnames == self._columns if whole else self._header.encode().startswith(content)):
            raise StudyError(f"{self.path}: has other columns than this study writes (move it away, or give --output)")
        self._begun = bool(whole)
        for row in reader:
            self._rows[self._key_of(row)] = row
        if whole:  # else the table is not known to be the study's own
            drop_torn_line(self.path, content)

    @property
    def _header(self) -> str:
        return ",".join(self._columns) + "\n"

    def _key_of(self, cell: dict[str, Any]) -> tuple[str, ...]:
        return tuple(as_text(cell.get(name)) for name in self._key)


def as_text(value: Any) -> str:
    """Format a value for the table; the same text for the same value, so that rows are found again."""
    if value is None:
        return ""
    return f"{value:.10g}" if isinstance(value, float) else str(value)
