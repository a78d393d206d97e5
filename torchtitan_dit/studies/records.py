"""Records of studies read back, and reports written from them alone."""

import argparse
import csv
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from torchtitan.errors import unwrapped
from torchtitan.experiments.cells import Row
from torchtitan.experiments.folder import ResultsFolder, StudyError
from torchtitan.files.durable import make_folder, replace_file
from torchtitan.files.regular import read_text
from torchtitan_dit.studies.frame import require_at_least


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


def add_report_options(parser: argparse.ArgumentParser, study: str, cells: int) -> None:
    """Add the options of a report on the records of a study with so many cells."""
    add = parser.add_argument
    add("records", metavar="RECORD", type=Path, nargs="+", help=f"results.csv of {study}, or a folder that holds it")
    add("--cells", type=int, default=cells, metavar="N", help="cells of the whole study; with fewer, no verdict (default: "
        f"{cells})")
    output = f"outputs/studies/{study}_report"
    add("--output", type=Path, default=Path(output), help=f"folder of the results (default: {output})")


def report_records(
    arguments: argparse.Namespace, study: str, needed: Collection[str], key: Sequence[str],
    report: Callable[[Sequence[Row], Path, int], str],
) -> Path:  # fmt: skip
    """Write the report on a study's records; return summary.md.

    Args:
        arguments: of `add_report_options`.
        study, needed, key: as of `read_records`.
        report: of the rows, the folder of the pictures and the number of cells of the whole study; returns the text.

    Raises:
        StudyError: an argument below its bound, no records of the study, or a folder that cannot be written.
    """
    require_at_least(arguments, {"cells": 1})
    rows = [row for path in arguments.records for row in read_records(path, study, needed, key)]
    return write_report(arguments.output, f"{study}_report", lambda folder: report(rows, folder, arguments.cells))


def write_report(folder: Path, name: str, report: Callable[[Path], str]) -> Path:
    """Write a report's summary.md, and its pictures.

    Args:
        folder: of the results; made if missing.
        name: of the report; the heading of summary.md, `# name`, identifies the folder.
        report: writes pictures into the folder, returns the text below the heading.

    Raises:
        StudyError: the folder holds something else, or cannot be written.
    """
    ResultsFolder(folder, {"summary.md": _heading(name).encode()}).refuse_foreign()
    return write_summary(folder, name, report)


def write_summary(folder: Path, name: str, report: Callable[[Path], str]) -> Path:
    """Write a report as `write_report` does, into a folder that is known to be the study's. Raises StudyError."""
    heading = _heading(name)
    try:
        make_folder(folder)
        replace_file(folder / "summary.md", heading)  # by which the folder is known from now on
        replace_file(folder / "summary.md", heading + report(folder))
    except OSError as error:
        raise StudyError(f"{folder}: cannot be written: {error.strerror}") from error
    return folder / "summary.md"


def _heading(name: str) -> str:
    return f"# {name}\n\n"


def numbers_of(row: Row, name: str) -> list[float]:
    """Read the numbers of a column that holds several, separated by spaces."""
    return [float(word) for word in row[name].split()]
