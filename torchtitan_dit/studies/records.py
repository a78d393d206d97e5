"""Records of studies read back, and reports written from them alone."""

import argparse
import csv
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torchtitan.errors import unwrapped
from torchtitan.experiments.cells import Row
from torchtitan.experiments.folder import ResultsFolder, StudyError
from torchtitan.files.durable import make_folder, replace_file
from torchtitan.files.regular import read_text
from torchtitan_dit.studies.frame import require_at_least


@dataclass(frozen=True)
class Protocol:
    """Cells that a study registered before it was run, and the columns of its record.

    Attributes:
        study: its name.
        needed: columns that a record of it has.
        key: columns that a row is known by; of two such rows in one file the later counts.
        cell: columns that identify a cell of the protocol, however it was measured; each counts once.
        part: columns that identify a part of the study: a data set, a training.
        parts: values of these columns, as registered.
        cells: of each part.
    """

    study: str
    needed: Collection[str]
    key: Sequence[str]
    cell: Sequence[str]
    part: Sequence[str]
    parts: Sequence[tuple[str, ...]]
    cells: int

    def refuse_twice(self, rows: Iterable[tuple[Path, Row]]) -> None:
        """Refuse a cell that occurs twice in the rows of the files, each given with its path. Raises StudyError."""
        seen: dict[tuple[str, ...], tuple[Path, Row]] = {}
        for path, row in rows:
            other, first = seen.setdefault(tuple(row[name] for name in self.cell), (path, row))
            if first is not row:
                differing = ", ".join(name for name in self.key if row[name] != first[name])
                how = f", with different {differing}" if differing else ""
                raise StudyError(
                    f"{other} and {path}: both hold {self.name(self._part(row))}, step {row['step']}, bin {row['bin']}{how}; "
                    "a cell counts once: give the records of one"
                )

    def is_complete(self, rows: Iterable[Row]) -> bool:
        """True if the rows are all cells of every part, and no others: none may be added after the first result."""
        return self._found(rows) == Counter(dict.fromkeys(self.parts, self.cells))

    def interim(self, rows: Iterable[Row]) -> str:
        """Sentence instead of a verdict, for rows that are not complete."""
        return f"Interim, without a verdict: {self.counts(rows)} cells.\n\n"

    def counts(self, rows: Iterable[Row]) -> str:
        """Count the rows of each part, in words; of parts that are not registered, 0 cells are planned."""
        found = self._found(rows)
        planned = {part: self.cells if part in self.parts else 0 for part in (*self.parts, *found)}
        return ", ".join(f"{self.name(part)} {found[part]} of {cells}" for part, cells in planned.items())

    def name(self, part: tuple[str, ...]) -> str:
        """Name of a part."""
        return " ".join(value if name == "data" else f"{name} {value}" for name, value in zip(self.part, part, strict=True))

    def _found(self, rows: Iterable[Row]) -> Counter[tuple[str, ...]]:
        return Counter(map(self._part, rows))

    def _part(self, row: Row) -> tuple[str, ...]:
        return tuple(row[name] for name in self.part)


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


def add_report_options(parser: argparse.ArgumentParser, protocol: Protocol) -> None:
    """Add the options of a report on the records of a study."""
    add = parser.add_argument
    add("records", metavar="RECORD", type=Path, nargs="+", help=f"results.csv of {protocol.study}, or a folder that holds it")
    parts = ", ".join(map(protocol.name, protocol.parts))
    add("--cells", type=int, default=protocol.cells, metavar="N", help=f"cells of each of {parts}; with another number of any, "
        f"no verdict (default: {protocol.cells})")
    output = f"outputs/studies/{protocol.study}_report"
    add("--output", type=Path, default=Path(output), help=f"folder of the results (default: {output})")


def report_records(
    arguments: argparse.Namespace, protocol: Protocol, report: Callable[[Sequence[Row], Path, Protocol], str]
) -> Path:  # fmt: skip
    """Write the report on a study's records; return summary.md.

    Args:
        arguments: of `add_report_options`.
        protocol: of the study.
        report: of the rows, the folder of the pictures and the protocol; returns the text.

    Raises:
        StudyError: an argument below its bound, no records of the study, a cell twice, or a folder that cannot be written.
    """
    require_at_least(arguments, {"cells": 1})
    protocol, needed = replace(protocol, cells=arguments.cells), {*protocol.needed, *protocol.cell, *protocol.part}
    found = [(path, row) for path in arguments.records for row in read_records(path, protocol.study, needed, protocol.key)]
    protocol.refuse_twice(found)
    rows = [row for _, row in found]
    return write_report(arguments.output, f"{protocol.study}_report", lambda folder: report(rows, folder, protocol))


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
