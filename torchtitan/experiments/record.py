"""Record of a sweep: a row per finished run, whole and on the disk as soon as it is added.

    outputs/<sweep>/sweep.toml   the sweep's file
                    base.toml    the configuration that its cells start from, if there is one
                    sweep.jsonl  one object per finished run of a cell; the last one of a cell's repeat counts
                    logs/        output of the processes of each run
                    <run>/       the runs' own folders
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torchtitan.experiments.folder import ResultsFolder
from torchtitan.experiments.grid import Sweep, SweepError, saved_table
from torchtitan.files.durable import append_synced, replace_file
from torchtitan.files.regular import read_regular, read_text
from torchtitan.settings.schema import quoted

STATE_FILE, SWEEP_FILE, BASE_FILE = "sweep.jsonl", "sweep.toml", "base.toml"
# Keys that may change when a sweep resumes: limits, repeats, what a machine must have, and which points are left out.
_MAY_CHANGE = ("repeats", "retries", "timeout_s", "needs.gpus", "exclude")

Row = dict[str, Any]


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
        """Hold the folder, and copy the sweep's file and base to it. Raises Busy; SweepError: it cannot be written."""
        with self._folder.held():
            for name, text in self._files(sweep).items():
                replace_file(self.path / name, text)
            if (self.path / STATE_FILE).exists():
                drop_torn_line(self.path / STATE_FILE, read_regular(self.path / STATE_FILE))
            yield

    @property
    def base(self) -> Path | None:
        path = self.path / BASE_FILE
        return path if path.exists() else None

    def rows(self) -> dict[tuple[str, int], Row]:
        """Latest row of every cell and repeat, without a last one torn by a kill. Raises SweepError: damaged."""
        rows: dict[tuple[str, int], Row] = {}
        lines = self._folder.read(STATE_FILE, lambda text: text.split("\n")[:-1])
        for number, line in enumerate(lines or [], 1):
            try:
                row = json.loads(line)
                rows[row["cell"], row["repeat"]] = row | {"status": row["status"]}
            except (ValueError, KeyError, TypeError):
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


def drop_torn_line(path: Path, content: bytes) -> None:
    """Drop a torn last line, left by a kill."""
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        with open(path, "r+b") as file:
            file.truncate(whole)
            os.fsync(file.fileno())


def _text(value: Any) -> str:
    return "none" if value is None else quoted(value)
