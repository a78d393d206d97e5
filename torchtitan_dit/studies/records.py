"""Records of studies read back, and reports written from them alone."""

import csv
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from torchtitan.errors import unwrapped
from torchtitan.experiments.cells import Row
from torchtitan.experiments.folder import ResultsFolder, StudyError
from torchtitan.files.durable import replace_file
from torchtitan.files.regular import read_text


def read_records(path: Path, study: str, needed: Collection[str], key: Sequence[str]) -> list[Row]:
    """Read the rows of a study's record; of two with one key the later counts.

    Args:
        path: results.csv, or a folder that holds it.
        study: its name.
        needed: columns that a record of it has.
        key: columns that a cell is known by.

    Raises:
        StudyError: unreadable, or no record of this study.
    """
    path = path / "results.csv" if path.is_dir() else path
    try:
        reader = csv.DictReader(read_text(path).splitlines())
        rows = [row for row in reader if None not in row.values()]
    except (OSError, ValueError, csv.Error) as error:
        raise StudyError(f"{path}: cannot be read: {unwrapped(error)}") from error
    if missing := {*needed, *key} - set(reader.fieldnames or ()):
        raise StudyError(f"{path}: is no record of {study} (it has no column {min(missing)})")
    return list({tuple(row[name] for name in key): row for row in rows}.values())


def write_report(folder: Path, name: str, report: Callable[[Path], str]) -> Path:
    """Write a report's summary.md, and its pictures.

    Args:
        folder: of the results; made if missing.
        name: of the report's study, by whose heading the folder is known.
        report: writes pictures into the folder, returns the text below the heading.

    Raises:
        StudyError: the folder holds something else, or cannot be written.
    """
    heading = f"# {name}\n\n"
    ResultsFolder(folder, {"summary.md": heading.encode()}).refuse_foreign()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(folder / "summary.md", heading)  # by which the folder is known from now on
        replace_file(folder / "summary.md", heading + report(folder))
    except OSError as error:
        raise StudyError(f"{folder}: cannot be written: {error.strerror}") from error
    return folder / "summary.md"


def numbers_of(row: Row, name: str) -> list[float]:
    """Read the numbers of a column that holds several, separated by spaces."""
    return [float(word) for word in row[name].split()]
