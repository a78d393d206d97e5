"""The folder that an experiment's results lie in: of one experiment alone, and of one process at a time."""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from torchtitan.config.job import JobConfig
from torchtitan.files.durable import make_folder, remove_unfinished, replace_file
from torchtitan.files.ownership import foreign_entry, foreign_text
from torchtitan.files.regular import read_text
from torchtitan.files.run_lock import Busy, RunLock
from torchtitan.settings.record import config_differences, effective

# Files by which a study's folder is known, and what they begin with; a table's columns are compared when it is read.
STUDY_MARKS = {"run.json": b"{", "results.csv": b"model,", "training.csv": b"run,"}
_RUN_FILE = "run.json"
_ADVICE = "give another --output, or move the folder away"

T = TypeVar("T")


class ExperimentError(Exception):
    """An experiment that cannot be made as asked; the message is one line."""


class StudyError(ExperimentError):
    """A study that cannot be made as asked; the message is one line."""


@dataclass(frozen=True)
class ResultsFolder:
    """A folder of results.

    Attributes:
        path: of the folder, which need not be there.
        marks: files by which it is known, as `foreign_entry` takes them.
        error: raised where it cannot be used.
        owner: whose folder it is, in words.
    """

    path: Path
    marks: Mapping[str, bytes]
    error: type[ExperimentError] = StudyError
    owner: str = "this study's"

    def refuse_foreign(self) -> None:
        """Refuse a folder that holds files, but none of this experiment. Raises ExperimentError."""
        try:
            name = foreign_entry(self.path, self.marks)
        except OSError as error:
            raise self.error(f"{self.path}: cannot be written: {error.strerror} (give another --output)") from error
        if name:
            raise self.error(foreign_text(self.path, name, self.owner, "give another --output, or move it away"))

    def read(self, name: str, parse: Callable[[str], T]) -> T | None:
        """What a file says that the results are of; None where there is no such file.

        Raises:
            ExperimentError: it cannot be read, or is damaged: `parse` raises ValueError, KeyError or TypeError.
        """
        path = self.path / name
        try:
            return parse(read_text(path))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise self.error(f"{path}: cannot be read: {error.strerror}") from None
        except (ValueError, KeyError, TypeError, RecursionError):
            raise self.error(f"{path}: is damaged (restore it, or {_ADVICE})") from None

    def refuse(self, held: str) -> NoReturn:
        """Refuse the results of another experiment. Raises ExperimentError."""
        raise self.error(f"{self.path}: holds {held} ({_ADVICE})")

    @contextmanager
    def held(self) -> Iterator[None]:
        """Make the folder and work in it alone.

        Raises:
            Busy: another process is at work there.
            ExperimentError: what is written there cannot be.
        """
        lock = RunLock(self.path)
        try:
            make_folder(self.path)
            if owner := lock.acquire():
                raise Busy(self.path, owner, "give another --output")
            remove_unfinished(self.path)
            yield
        except OSError as error:
            place = error.filename or self.path
            raise self.error(f"{place}: cannot be written: {error.strerror or error}") from error
        finally:
            lock.release()


def refuse_other_run(folder: ResultsFolder, run: Path, config: JobConfig) -> None:
    """Compare a run with the one that the folder's results are of; a folder that does not say is taken as it is.

    The way from the folder to the run is compared, so that a run may be moved with its studies; and of its
    configuration what decides how it learns, so that a run trained anew in the same place is another one.

    Raises:
        ExperimentError: it is another run, or run.json is damaged or cannot be read.
    """
    kept = folder.read(_RUN_FILE, _parse_run)
    if kept is None:
        return
    other, config_of_other = kept
    if other != _way(folder.path, run):
        folder.refuse(f"results of another run, {os.path.normpath(folder.path.resolve() / other)}")
    if differences := config_differences(config_of_other, config):
        folder.refuse(f"results of this run as it was configured before, {differences[0]}")


def claim(folder: Path, run: Path, config: JobConfig) -> None:
    """Make the folder, and say in it which run its results will be of, where it does not yet. Raises OSError."""
    make_folder(folder)
    path = folder / _RUN_FILE
    if not path.exists():
        kept: dict[str, Any] = {"run": _way(folder, run), "config": effective(config)}
        replace_file(path, json.dumps(kept, indent=1) + "\n")


def _parse_run(text: str) -> tuple[str, dict[str, Any]]:
    kept = json.loads(text)
    other, config = kept["run"], kept["config"]
    if not (isinstance(other, str) and isinstance(config, dict)):
        raise ValueError("no run and its configuration")
    return other, config


def _way(folder: Path, run: Path) -> str:
    return Path(os.path.relpath(run.resolve(), folder.resolve())).as_posix()
