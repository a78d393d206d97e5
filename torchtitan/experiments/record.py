"""Records of experiments: a row per finished cell, whole and on the disk as soon as it is added.

    results.csv, training.csv    of studies

    outputs/<sweep>/sweep.toml   the sweep's file
                    base.toml    the configuration that its cells start from, if there is one
                    sweep.jsonl  one object per finished run of a cell; the last one of a cell's repeat counts
                    logs/        output of the processes of each run
                    <run>/       the runs' own folders
"""

import csv
import io
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torchtitan.experiments.folder import ResultsFolder, StudyError
from torchtitan.experiments.grid import Sweep, SweepError, saved_table
from torchtitan.files.durable import append_synced, replace_file
from torchtitan.files.regular import read_regular, read_text
from torchtitan.settings.schema import quoted

STATE_FILE, SWEEP_FILE, BASE_FILE = "sweep.jsonl", "sweep.toml", "base.toml"
# Keys that may change when a sweep resumes: limits, repeats, what a machine must have, and which points are left out.
_MAY_CHANGE = ("repeats", "retries", "timeout_s", "needs.gpus", "exclude")
_LARGEST_TABLE = 1 << 28  # bytes

Row = dict[str, Any]


class ResultTable:
    """Table of a study: rows by key, appended one at a time; of two rows with one key, the later counts."""

    def __init__(self, path: Path, columns: Sequence[str], key: Sequence[str]) -> None:
        """Read the file, if it exists. Raises StudyError: it is no such table."""
        self.path = path
        self._columns = list(columns)
        self._key = list(key)
        self._rows: dict[tuple[str, ...], dict[str, str]] = {}
        self._begun = False
        if path.exists():
            self._read()

    def find(self, cell: Row) -> dict[str, str] | None:
        """Find the row of a cell, if it has one."""
        return self._rows.get(self._key_of(cell))

    def add(self, cell: Row) -> dict[str, str]:
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
            _drop_torn_line(self.path, content)

    @property
    def _header(self) -> str:
        return ",".join(self._columns) + "\n"

    def _key_of(self, cell: Row) -> tuple[str, ...]:
        return tuple(as_text(cell.get(name)) for name in self._key)


class SweepFolder:
    """Folder `outputs/<sweep>`, opened for one sweep."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._folder = ResultsFolder(path, {SWEEP_FILE: b"", STATE_FILE: b"{"}, SweepError, "a sweep's")

    def check(self, sweep: Sweep) -> None:
        """Check that an existing folder belongs to this sweep: values may be added to its axes and removed from them.

        Raises:
            SweepError: it belongs to another one, with the first difference; or it is no sweep's folder.
        """
        self._folder.refuse_foreign()
        for name, text in self._files(sweep).items():
            old, new = self._folder.read(name, saved_table), saved_table(text)
            if old is None:
                if (self.path / STATE_FILE).exists():
                    raise SweepError(f"{self.path}: has finished runs, but no {name} (give another --output)")
                continue
            if (axes := _axes(old)) != _axes(new):  # runs are named by them, in this order
                self._folder.refuse(f"another sweep, {name}: axes: {', '.join(axes)} -> {', '.join(_axes(new))}")
            for key in (*new, *old):
                may_change = name == SWEEP_FILE and (key in _MAY_CHANGE or key in axes)
                if old.get(key) != new.get(key) and not may_change:
                    self._folder.refuse(f"another sweep, {name}: {key}: {_text(old.get(key))} -> {_text(new.get(key))}")

    @contextmanager
    def held(self, sweep: Sweep) -> Iterator[None]:
        """Hold the folder and write the copies of the sweep's file and of its base.

        Raises:
            Busy: another process is at work there.
            SweepError: it cannot be written.
        """
        with self._folder.held():
            for name, text in self._files(sweep).items():
                replace_file(self.path / name, text)
            if (self.path / STATE_FILE).exists():
                _drop_torn_line(self.path / STATE_FILE, read_regular(self.path / STATE_FILE))
            yield

    @property
    def base(self) -> Path | None:
        path = self.path / BASE_FILE
        return path if path.exists() else None

    def rows(self) -> dict[tuple[str, int], Row]:
        """Rows: the latest of every cell and repeat.

        Raises:
            SweepError: a line is damaged; the last one may be torn by a kill, and does not count.
        """
        rows: dict[tuple[str, int], Row] = {}
        lines = self._folder.read(STATE_FILE, lambda text: text.split("\n")[:-1])
        for number, line in enumerate(lines or [], 1):
            try:
                row = json.loads(line)
                rows[row["cell"], row["repeat"]] = row | {"status": row["status"]}
            except (ValueError, KeyError, TypeError, RecursionError):
                text = f"line {number} is damaged (remove the line; its run is repeated)"
                raise SweepError(f"{self.path / STATE_FILE}: {text}") from None
        return rows

    def add(self, row: Row) -> None:
        """Append a row: whole and on the disk when this returns. Raises OSError."""
        append_synced(self.path / STATE_FILE, (json.dumps(row) + "\n").encode())

    def _files(self, sweep: Sweep) -> dict[str, str]:
        files = {SWEEP_FILE: sweep.text}
        if sweep.base is not None:
            files[BASE_FILE] = read_text(sweep.base)
        return files


def _axes(table: Row) -> list[str]:
    return [key for key in table if key.startswith("axes.")]


def as_text(value: Any) -> str:
    """Format a value for the table; the same text for the same value, so that rows are found again."""
    if value is None:
        return ""
    return f"{value:.10g}" if isinstance(value, float) else str(value)


def _drop_torn_line(path: Path, content: bytes) -> None:
    """Drop a torn last line, left by a kill."""
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        with open(path, "r+b") as file:
            file.truncate(whole)
            os.fsync(file.fileno())


def _text(value: Any) -> str:
    return "none" if value is None else quoted(value)
