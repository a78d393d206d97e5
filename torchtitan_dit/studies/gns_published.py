"""Published result tables of the noise scale: as reported, and with the estimator's two errors corrected."""

import argparse
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from torchtitan.experiments.folder import ResultsFolder, StudyError
from torchtitan.files.durable import replace_file
from torchtitan.pictures.markdown import inline, markdown_table
from torchtitan.pictures.style import legend_outside, new_figure, ordered_colours
from torchtitan_dit.studies import gns_plots
from torchtitan_dit.studies.published_estimator import (
    Cell,
    PublishedRow,
    TableError,
    corrected_row,
    corrected_table,
    known_median,
    read_tables,
    reported_table,
)

Setting = tuple[int, int, int, float | None]  # b, B, pairs of batches, share of the data behind the gradient norm

_HEADING = "# gns_published\n\n"
_SHARES = "share of the data behind the gradient norm (%)"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("tables", metavar="TABLES", type=Path, help="a folder of published CSV tables, or one of them")
    parser.add_argument("--output", type=Path, default=Path("outputs/studies/gns_published"),
        help="folder of the results (default: outputs/studies/gns_published)")  # fmt: skip


def run_alone(arguments: argparse.Namespace) -> Path:
    """Read the tables, write pictures and summary.md; return the latter. Raises StudyError."""
    folder = arguments.output
    ResultsFolder(folder, {"summary.md": _HEADING.encode()}).refuse_foreign()
    try:
        tables = read_tables(arguments.tables)
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(folder / "summary.md", _HEADING)  # by which the folder is known from now on
        text = f"{_HEADING}Estimates of the gradient noise scale (samples), as published and corrected.\n\n"
        for name, rows in tables.items():
            text += _section(name, rows, folder)
        replace_file(folder / "summary.md", text)
    except TableError as error:
        raise StudyError(str(error)) from error
    except OSError as error:
        raise StudyError(f"{folder}: cannot be written: {error.strerror}") from error
    return folder / "summary.md"


def _section(name: str, rows: Sequence[PublishedRow], folder: Path) -> str:
    text = f"## {inline(name)} ({len(rows)} rows)\n\n"
    binned, whole = ([row for row in rows if (row.t_min is None) is of_all] for of_all in (False, True))
    if binned:
        text += _bins_section(name, binned, folder)
    if binned and whole:
        text += f"All timesteps, {len(whole)} of the rows:\n\n"
    if whole:
        text += _by_setting(whole) + _setting_picture(name, whole, folder / f"{name}{'.all' if binned else ''}.png")
    return text


def _bins_section(name: str, rows: Sequence[PublishedRow], folder: Path) -> str:
    """Tables and a picture of each setting; a table of one checkpoint at several shares of the data is over these."""
    over_shares, text = _over_shares(rows), ""
    groups = _groups(rows, over_shares)
    for number, group in enumerate(groups, 1):
        same = [row for row in rows if _setting(row)[: len(group)] == group]
        reported, right = reported_table(same), corrected_table(same)
        scales = {cell: values[0] for cell, values in right.items()}
        if len(groups) > 1:
            text += f"Rows with {_name(group, with_share=True)}.\n\n"
        text += "Reported, mean over rows:\n\n" + _by_bin(reported, over_shares)
        text += "Corrected, median over rows (no interval can be given; draws that were left out still bias it):\n\n"
        text += _by_bin(scales, over_shares)
        path = folder / (f"{name}.{number}.png" if len(groups) > 1 else f"{name}.png")
        text += _bin_picture(name, reported, scales, over_shares, path)
    return text


def _by_bin(table: dict[Cell, float], over_shares: bool) -> str:
    values = {(_place(cell, over_shares), cell.t_min): value for cell, value in table.items()}
    places, bins = sorted({place for place, _ in values}), _bins(table)
    lines = [[f"{place:.10g}", *(_short(values.get((place, low))) for low in bins)] for place in places]
    return markdown_table(["share of the data (%)" if over_shares else "step", *(f"k from {low}" for low in bins)], lines)


def _by_setting(rows: Sequence[PublishedRow]) -> str:
    lines = []
    for step in sorted({row.step for row in rows}):
        for setting in _settings(rows):
            same = [row for row in rows if row.step == step and _setting(row) == setting]
            if same:
                *sizes, share = setting
                right = [corrected_row(row)[0] for row in same]
                seconds = [row.seconds for row in same if row.seconds is not None]
                lines.append([
                    str(step), *map(str, sizes), _short(share), str(len(same)), _short(known_median(row.gns for row in same)),
                    _short(known_median(right)), f"{known_median(seconds):.0f}" if seconds else "",
                ])  # fmt: skip
    header = [
        "step", "b", "B", "reps", "share of the data", "rows", "reported, median", "corrected, median", "seconds, median",
    ]  # fmt: skip
    return markdown_table(header, lines)


def _bin_picture(name: str, reported: dict[Cell, float], right: dict[Cell, float], over_shares: bool, path: Path) -> str:
    figure, axes = new_figure(name, columns=2, size=(12.5, 5), sharey=True)
    bins = _bins(reported)
    for axis, table, title in zip(axes[0], (reported, right), ("reported", "corrected"), strict=True):
        for color, low in zip(ordered_colours(len(bins)), bins, strict=True):
            points = _on_log_axis((_place(cell, over_shares), value) for cell, value in table.items() if cell.t_min == low)
            axis.plot(*points, color=color, marker="o", markersize=4, label=f"from {low}")
        axis.set_title(title, fontsize=10)
        axis.set_xlabel(_SHARES if over_shares else "training step")
    legend_outside(axes[0, 1], "DDPM index (0 is clean data)")
    return _save(figure, path, [*reported.values(), *right.values()])


def _setting_picture(name: str, rows: Sequence[PublishedRow], path: Path) -> str:
    """Picture over the training steps, or over the share of the data in a table of one checkpoint at several."""
    figure, axes = new_figure(name, columns=2, size=(12.5, 5), sharey=True)
    over_shares = _over_shares(rows)
    groups = _groups(rows, over_shares)
    places = [_place(row, over_shares) for row in rows]
    span, drawn = max(places) - min(places), []
    for axis, title in zip(axes[0], ("reported", "corrected"), strict=True):
        for place, (color, group) in enumerate(zip(ordered_colours(len(groups)), groups, strict=True)):
            same = [row for row in rows if _setting(row)[: len(group)] == group]
            values = [row.gns if title == "reported" else corrected_row(row)[0] for row in same]
            shift = 0.02 * span * (place - 0.5 * (len(groups) - 1))  # so that settings do not hide each other
            points = _on_log_axis((_place(row, over_shares) + shift, value) for row, value in zip(same, values, strict=True))
            axis.plot(*points, color=color, marker="o", markersize=4, linestyle="none",
                      label=_name(group, len({row.true_portion for row in rows}) > 1))  # fmt: skip
            drawn += values
        axis.set_title(title, fontsize=10)
        axis.set_xlabel(_SHARES if over_shares else "training step (settings side by side)")
    legend_outside(axes[0, 1])
    return _save(figure, path, drawn)


def _on_log_axis(points: Iterable[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """Coordinates x and y, rising in x, of the points that a logarithmic axis has a place for."""
    shown = sorted(point for point in points if _has_place(point[1]))
    return [x for x, _ in shown], [y for _, y in shown]


def _has_place(value: float) -> bool:
    return 0 < value < math.inf


def _save(figure: Figure, path: Path, values: Sequence[float]) -> str:
    """Save a picture of these values; return its Markdown, with the number of those that have no place in it."""
    axis = figure.axes[0]
    axis.set_ylabel(gns_plots.NOISE_SCALE)
    if any(map(_has_place, values)):
        axis.set_yscale("log")
    text = gns_plots.save(figure, path)
    if missing := sum(not _has_place(value) for value in values):
        text += f"Not in the picture, since not positive, unbounded or unknown: {missing} of {len(values)} values.\n\n"
    return text


def _over_shares(rows: Sequence[PublishedRow]) -> bool:
    """True for a table of one checkpoint at several shares of the data."""
    shares = {row.true_portion for row in rows}
    return len({row.step for row in rows}) == 1 < len(shares) and None not in shares


def _groups(rows: Sequence[PublishedRow], over_shares: bool) -> list[tuple]:
    """Settings, or where the axis is the share of the data what else they are made of."""
    settings = _settings(rows)
    return list(dict.fromkeys(setting[:3] for setting in settings)) if over_shares else list(settings)


def _place(row: PublishedRow | Cell, over_shares: bool) -> float:
    return 100 * row.true_portion if over_shares and row.true_portion is not None else row.step


def _setting(row: PublishedRow) -> Setting:
    return row.b, row.big_b, row.reps, row.true_portion


def _settings(rows: Sequence[PublishedRow]) -> list[Setting]:
    return sorted({_setting(row) for row in rows}, key=lambda setting: (*setting[:3], setting[3] or 0.0))


def _name(group: tuple, with_share: bool) -> str:
    """Name of a setting, or of settings at several shares."""
    b, big_b, reps, *share = group
    text = f"b = {b}, B = {big_b}, reps = {reps}"
    return f"{text}, {100 * share[0]:g} % of the data" if with_share and share and share[0] is not None else text


def _bins(table: dict[Cell, float]) -> list[int]:
    return sorted({cell.t_min for cell in table if cell.t_min is not None})


def _short(value: float | None) -> str:
    """Format three digits, or all before the point; a dash without a value."""
    if value is None:
        return "–"
    if not math.isfinite(value):
        return "unknown" if math.isnan(value) else "unbounded"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
