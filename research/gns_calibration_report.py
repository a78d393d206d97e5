"""Report of calibrations from their tables alone: cells, statistics and picture.

    python -m research gns_calibration_report FOLDER...
"""

import argparse
import csv
import math
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullFormatter

from research.cells import Row
from research.gns_calibration_statistics import (
    GEOMETRIES,
    UPDATES,
    Agreement,
    Finding,
    agreement,
    interval_columns,
    interval_of,
    usable,
)
from research.pictures import interval_text, save
from torchtitan.errors import unwrapped
from torchtitan.experiments.folder import ResultsFolder, StudyError
from torchtitan.files.durable import make_folder, replace_file
from torchtitan.files.regular import read_text
from torchtitan.pictures.colours import COLOURS
from torchtitan.pictures.markdown import markdown_table
from torchtitan.pictures.style import MARKERS, new_figure, note, ordered_colours
from torchtitan.statistics.interval import Interval

PICTURE = "calibration.png"
_ESTIMATES = {"half": "hyperbola", "interpolated": "interpolated"}
_CELL = ("data", "step", "t_min", "t_max")  # columns that identify a cell, however it was measured
_NEEDED = {
    *_CELL, "bin", "status", "reason", *GEOMETRIES,
    *(name for update in UPDATES for kind in _ESTIMATES for name in interval_columns(f"{update}_{kind}")),
}  # fmt: skip
_HEADING = "# gns_calibration_report\n\n"


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("tables", metavar="TABLE", type=Path, nargs="+", help="results.csv of gns_calibration, or a folder that holds it")
    output = "outputs/studies/gns_calibration_report"
    add("--output", type=Path, default=Path(output), help=f"folder of the results (default: {output})")


def run_alone(arguments: argparse.Namespace) -> Path:
    """Read the tables, write picture and summary.md; return the latter.

    Raises:
        StudyError: no table of the study, a cell twice, or a folder that cannot be written.
    """
    folder, rows = arguments.output, _read_tables(arguments.tables)
    ResultsFolder(folder, {"summary.md": _HEADING.encode()}).refuse_foreign()
    try:
        make_folder(folder)
        replace_file(folder / "summary.md", _HEADING)  # by which the folder is known from now on
        replace_file(folder / "summary.md", _HEADING + statistics_text(rows) + report_text(rows, folder))
    except OSError as error:
        raise StudyError(f"{folder}: cannot be written: {error.strerror}") from error
    return folder / "summary.md"


def _read_tables(paths: Sequence[Path]) -> list[Row]:
    """Read the rows of all tables; a cell counts once. Raises StudyError."""
    seen: dict[tuple[str, ...], Path] = {}
    found = []
    for path in paths:
        for row in _read_table(path / "results.csv" if path.is_dir() else path):
            other = seen.setdefault(tuple(row[name] for name in _CELL), path)
            if other is not path:
                where = f"{row['data']}, step {row['step']}, bin {row['bin']}"
                raise StudyError(f"{other} and {path}: both hold {where}; a cell counts once: give the tables of one")
            found.append(row)
    return found


def _read_table(path: Path) -> list[Row]:
    """Read the rows of a table; of two of one cell the later counts. Raises StudyError."""
    try:
        reader = csv.DictReader(read_text(path).splitlines())
        rows = [row for row in reader if None not in row.values()]
    except (OSError, ValueError, csv.Error) as error:
        raise StudyError(f"{path}: cannot be read: {unwrapped(error)}") from error
    if missing := _NEEDED - set(reader.fieldnames or ()):
        raise StudyError(f"{path}: is no table of gns_calibration (it has no column {min(missing)})")
    return list({tuple(row[name] for name in _CELL): row for row in rows}.values())


# ---------------------------------------------------------------------- text


def statistics_text(rows: Sequence[Row]) -> str:
    """Statistics of every update and geometry."""
    text = ""
    for update in UPDATES:
        text += f"## Update {update}\n\n"
        for estimate, name in _ESTIMATES.items():
            found = agreement(rows, update, estimate)
            text += _statistics_table(found, name) if found else f"{name}: too few cells with bounded estimates.\n\n"
    return text


def _statistics_table(found: Agreement, estimate: str) -> str:
    of_data = [("all", found.together), *found.apart.items()] if len(found.apart) > 1 else list(found.apart.items())
    lines = [
        [name, GEOMETRIES[geometry], *(interval_text(each, ".3g") for each in vars(one).values())]
        for name, of_geometry in of_data for geometry, one in of_geometry.items()
    ]  # fmt: skip
    header = ["data", "geometry", "slope", "B_half / B", "rank", "scatter of ln", "B_half / B of one bin"]
    left_out = f", {found.left_out} of {found.cells} cells left out" if found.left_out else ""
    return f"B_half: {estimate}{left_out}.\n\n" + markdown_table(header, lines)


def report_text(rows: Sequence[Row], folder: Path) -> str:
    """Table of the cells, and the picture, written into the folder."""
    known = [row for row in rows if row["status"] == "ok"]
    header = ["data", "step", "bin", *(f"B, {name}" for name in GEOMETRIES.values())]
    header += [f"B_half, {update}{'' if kind == 'half' else ', interpolated'}" for update in UPDATES for kind in _ESTIMATES]
    names = [*GEOMETRIES, *(f"{update}_{kind}" for update in UPDATES for kind in _ESTIMATES)]
    lines = [[row["data"], row["step"], row["bin"], *(_text(interval_of(row, name)) for name in names)] for row in known]
    text = "## Cells\n\n" + markdown_table(header, lines)
    for update in UPDATES:
        if left_out := [row for row in known if not usable(row, update)]:
            cells = ", ".join(f"{row['data']} {row['step']}/{row['bin']}" for row in left_out)
            text += f"Not in the statistics of the {update} update, since an interval is unbounded: {cells}.\n\n"
    if failed := [row for row in rows if row["status"] != "ok"]:
        text += markdown_table(["data", "step", "bin", "no answer"],
                               ([row["data"], row["step"], row["bin"], row["reason"]] for row in failed))  # fmt: skip
    if known:
        text += draw_picture(known, folder / PICTURE)
    return text


def _text(found: Interval) -> str:
    """Format a batch with its interval; more or less than an end where it is unbounded."""
    if math.isnan(found.value):
        return "unknown"
    if math.isinf(found.upper):
        return f"> {found.lower:.3g}" if found.lower > 0 else "unbounded"
    return f"{found.value:.3g} [{found.lower:.3g}, {found.upper:.3g}]" if found.lower > 0 else f"< {found.upper:.3g}"


# ---------------------------------------------------------------------- picture


def draw_picture(rows: Sequence[Row], path: Path) -> str:
    """Draw a panel per update and geometry: B_half over B with 95 % intervals, and the line of the mean ratio."""
    figure, axes = new_figure(
        "Half-progress batch of one step against the noise scale, per timestep bin", len(UPDATES), len(GEOMETRIES), (11, 7.2)
    )
    data = list(dict.fromkeys(row["data"] for row in rows))
    for panels, update in zip(axes, UPDATES, strict=True):
        found = agreement(rows, update)
        used = [row for row in rows if usable(row, update)]
        for panel, (geometry, name) in zip(panels, GEOMETRIES.items(), strict=True):
            for symbol, of_data in zip(MARKERS, data, strict=False):
                _draw_points(panel, [row for row in used if row["data"] == of_data], update, geometry, symbol)
            panel.set_xscale("log")
            panel.set_yscale("log")
            for axis in (panel.xaxis, panel.yaxis):
                axis.set_major_locator(LogLocator(subs=(1, 3)))
                axis.set_major_formatter("{x:g}")
                axis.set_minor_formatter(NullFormatter())
            panel.set_xlabel(f"B, geometry {name} (samples)")
            if found:
                _draw_ratio(panel, found.together[geometry])
        panels[0].set_ylabel(f"B_half, {update} update (samples)")
    for symbol, of_data in zip(MARKERS, data, strict=False):
        axes[0, 0].plot([], [], symbol, color=COLOURS[-1], markersize=4, label=of_data)
    axes[0, 0].legend(fontsize=8, frameon=False)
    note(figure, "dark to bright: from the first to the last age; bars: 95 % intervals; dashed: equal; solid: mean ratio")
    return save(figure, path)


def _draw_points(panel: Axes, rows: Sequence[Row], update: str, geometry: str, symbol: str) -> None:
    ages = sorted({int(row["step"]) for row in rows})
    for color, age in zip(ordered_colours(len(ages)), ages, strict=True):
        for row in (row for row in rows if int(row["step"]) == age):
            scale, half = interval_of(row, geometry), interval_of(row, f"{update}_half")
            panel.hlines(half.value, scale.lower, scale.upper, color=color, linewidth=0.7, alpha=0.5)
            panel.vlines(scale.value, half.lower, half.upper, color=color, linewidth=0.7, alpha=0.5)
            panel.plot(scale.value, half.value, symbol, color=color, markersize=4)


def _draw_ratio(panel: Axes, found: Finding) -> None:
    ends = panel.get_xlim()
    panel.plot(ends, ends, "--", color="0.5", linewidth=0.8)
    panel.plot(ends, [found.ratio.value * end for end in ends], "-", color=COLOURS[1], linewidth=1.2)
    panel.set_xlim(ends)
    words = f"slope {found.slope.value:.2f}, ratio {found.ratio.value:.2f}, rank {found.rank.value:.2f}"
    panel.set_title(words, fontsize=9)
