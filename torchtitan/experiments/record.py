"""The folder of a sweep: what was asked for, which runs are finished, and who is at work there.

    outputs/<sweep>/sweep.toml    the sweep's file
                    base.toml     the configuration that its cells start from, if there is one
                    sweep.jsonl   one object per finished run of a cell; the last one of a cell's repeat counts
                    logs/         output of the processes of each run
                    <run>/        the runs' own folders
"""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torchtitan.experiments.grid import Sweep, SweepError, saved_table
from torchtitan.files.durable import append_synced, make_folder, remove_unfinished, replace_file
from torchtitan.files.ownership import LOCK_FILE, foreign_entry, foreign_text
from torchtitan.files.regular import read_regular, read_text
from torchtitan.files.run_lock import Busy
from torchtitan.settings.schema import shown

STATE_FILE, SWEEP_FILE, BASE_FILE = "sweep.jsonl", "sweep.toml", "base.toml"
# What may be changed to go on with a sweep: it says how long and how often, not what.
_MAY_CHANGE = ("repeats", "timeout_s")

Row = dict[str, Any]


class SweepFolder:
    """`outputs/<sweep>`, opened for one sweep."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def check(self, sweep: Sweep) -> None:
        """Make sure that the folder, if it is there, is of this sweep.

        Raises:
            SweepError: it is of another one, with the first difference; or it is no sweep's folder at all.
        """
        try:
            name = foreign_entry(self.path, {SWEEP_FILE: b"", STATE_FILE: b"{"})
        except OSError as error:
            raise SweepError(f"{self.path}: cannot be written: {error.strerror} (give another --output)") from error
        if name:
            advice = "give another name or --output, or move it away"
            raise SweepError(foreign_text(self.path, name, "a sweep's", advice))
        state = self.path / STATE_FILE
        for name, text in self._files(sweep).items():
            try:
                old = saved_table(self._read(name))
            except FileNotFoundError:
                if state.exists():
                    raise SweepError(f"{self.path}: has finished runs, but no {name} (give another --output)") from None
                continue
            except (ValueError, RecursionError):
                raise SweepError(f"{self.path / name}: damaged (restore it, or give another --output)") from None
            new = saved_table(text)
            for key in [*new, *old]:
                if old.get(key) != new.get(key) and not (name == SWEEP_FILE and key in _MAY_CHANGE):
                    change = f"{name}: {key}: {_text(old.get(key))} -> {_text(new.get(key))}"
                    raise SweepError(f"{self.path}: holds another sweep ({change}; give another name or --output)")

    @contextmanager
    def held(self, sweep: Sweep) -> Iterator[None]:
        """Work in the folder, alone; writes the copies of the sweep's file and of its base.

        Raises:
            Busy: another process is at work there.
            OSError: it cannot be written.
        """
        make_folder(self.path)
        with open(self.path / LOCK_FILE, "a", encoding="utf-8") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise Busy(self.path, "a sweep", "give another --output") from None
            for name, text in self._files(sweep).items():
                replace_file(self.path / name, text)
            remove_unfinished(self.path)
            self._drop_torn_line()
            yield

    @property
    def base(self) -> Path | None:
        path = self.path / BASE_FILE
        return path if path.exists() else None

    def rows(self) -> dict[tuple[str, int], Row]:
        """The latest row of every cell and repeat.

        Raises:
            SweepError: a line is damaged; the last one may be torn by a kill, and does not count.
        """
        try:
            lines = self._read(STATE_FILE).split("\n")[:-1]
        except FileNotFoundError:
            return {}
        except UnicodeDecodeError:
            raise SweepError(f"{self.path / STATE_FILE}: damaged, it is not UTF-8 text (restore it)") from None
        rows: dict[tuple[str, int], Row] = {}
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
                rows[row["cell"], row["repeat"]] = {**row, "status": row["status"]}
            except (ValueError, KeyError, TypeError, RecursionError):
                text = f"line {number} is damaged (remove the line; its run is made again)"
                raise SweepError(f"{self.path / STATE_FILE}: {text}") from None
        return rows

    def add(self, row: Row) -> None:
        """Append a row: whole and on the disk when this returns. Raises OSError."""
        append_synced(self.path / STATE_FILE, (json.dumps(row) + "\n").encode())

    def _read(self, name: str) -> str:
        try:
            return read_text(self.path / name)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise SweepError(f"{self.path / name}: cannot be read: {error.strerror}") from error

    def _files(self, sweep: Sweep) -> dict[str, str]:
        files = {SWEEP_FILE: sweep.text}
        if sweep.base is not None:
            files[BASE_FILE] = read_text(sweep.base)
        return files

    def _drop_torn_line(self) -> None:
        path = self.path / STATE_FILE
        content = read_regular(path) if path.exists() else b""
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            os.truncate(path, whole)


def _text(value: Any) -> str:
    return "none" if value is None else shown(value)
