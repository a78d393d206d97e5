"""Folder of an experiment's results: of one experiment alone, and of one process at a time."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TypeVar

from torchtitan.files.durable import make_folder, remove_unfinished
from torchtitan.files.ownership import foreign_entry, foreign_text
from torchtitan.files.regular import read_text
from torchtitan.files.run_lock import Busy, RunLock

_ADVICE = "give another --output, or move the folder away"

T = TypeVar("T")


class ExperimentError(Exception):
    """Experiment that cannot be run as requested; the message is one line."""


class StudyError(ExperimentError):
    """Study that cannot be run as requested; the message is one line."""


@dataclass(frozen=True)
class ResultsFolder:
    """Folder of results; marks: files that identify it, as for `foreign_entry`."""

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
        """Read a file's record of the experiment; None where there is no such file.

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
        except (ValueError, KeyError, TypeError):
            raise self.error(f"{path}: is damaged (restore it, or {_ADVICE})") from None

    def refuse(self, held: str) -> NoReturn:
        """Refuse the results of another experiment. Raises ExperimentError."""
        raise self.error(f"{self.path}: holds {held} ({_ADVICE})")

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the folder: make it and work in it alone. Raises Busy: another does; ExperimentError: unwritable."""
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
