"""Published result tables of the noise scale: as reported, and with the estimator's two errors corrected."""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from torchtitan.evaluation.offline_gradients import EstimateFailed
from torchtitan.experiments.folder import ResultsFolder, StudyError
from torchtitan.files.durable import replace_file
from torchtitan.pictures.markdown import inline, markdown_table
from torchtitan.pictures.style import legend_outside, new_figure, ordered_colours
from torchtitan_dit.studies import gns_plots
from torchtitan_dit.studies.published_estimator import (
    PublishedRow,
    TableError,
    corrected,
    corrected_table,
    read_tables,
    reported_table,
)

Cell = tuple[int, int | None]
Setting = tuple[int, int, int, float | None]  # b, B, pairs of batches, share of the data behind the gradient norm

_HEADING = "# gns_published\n\n"


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
    except (TableError, EstimateFailed) as error:
        raise StudyError(str(error)) from error
    except OSError as error:
        raise StudyError(f"{folder}: cannot be written: {error.strerror}") from error
    return folder / "summary.md"


def _section(name: str, rows: Sequence[PublishedRow], folder: Path) -> str:
    text = f"## {inline(name)} ({len(rows)} rows)\n\n"
    if any(row.t_min is not None for row in rows):
        reported, right = reported_table(rows), corrected_table(rows)
        scales = {cell: values[0] for cell, values in right.items()}
        text += "Reported, mean over rows:\n\n" + _by_bin(reported)
        text += "Corrected, median over rows (no interval can be given; draws that were left out still bias it):\n\n"
        text += _by_bin(scales)
        return text + _bin_picture(name, reported, scales, folder / f"{name}.png")
    text += _by_setting(rows)
    return text + _setting_picture(name, rows, folder / f"{name}.png")


def _by_bin(table: dict[Cell, float]) -> str:
    steps, bins = sorted({step for step, _ in table}), _bins(table)
    lines = [[str(step), *(_short(table.get((step, low))) for low in bins)] for step in steps]
    return markdown_table(["step", *(f"k from {low}" for low in bins)], lines)


def _by_setting(rows: Sequence[PublishedRow]) -> str:
    lines = []
    for step in sorted({row.step for row in rows}):
        for setting in _settings(rows):
            same = [row for row in rows if row.step == step and _setting(row) == setting]
            if same:
                *sizes, share = setting
                right = [_scale(row) for row in same]
                seconds = [row.seconds for row in same if row.seconds is not None]
                lines.append([
                    str(step), *map(str, sizes), _short(share), str(len(same)), _short(median(row.gns for row in same)),
                    _short(median(right)), f"{median(seconds):.0f}" if seconds else "",
                ])  # fmt: skip
    header = [
        "step", "b", "B", "reps", "share of the data", "rows", "reported, median", "corrected, median", "seconds, median",
    ]  # fmt: skip
    return markdown_table(header, lines)


def _bin_picture(name: str, reported: dict[Cell, float], right: dict[Cell, float], path: Path) -> str:
    figure, axes = new_figure(name, columns=2, size=(12.5, 5), sharey=True)
    bins = _bins(reported)
    for axis, table, title in zip(axes[0], (reported, right), ("reported", "corrected"), strict=True):
        for color, low in zip(ordered_colours(len(bins)), bins, strict=True):
            points = sorted((step, value) for (step, start), value in table.items() if start == low)
            axis.plot(*zip(*points, strict=True), color=color, marker="o", markersize=4, label=f"from {low}")
        axis.set_title(title, fontsize=10)
        axis.set_yscale("log")
        axis.set_xlabel("training step")
    axes[0, 0].set_ylabel(gns_plots.NOISE_SCALE)
    legend_outside(axes[0, 1], "DDPM index (0 is clean data)")
    return gns_plots.save(figure, path)


def _setting_picture(name: str, rows: Sequence[PublishedRow], path: Path) -> str:
    """Picture over the training steps, or over the share of the data in a table of one checkpoint at several."""
    figure, axes = new_figure(name, columns=2, size=(12.5, 5), sharey=True)
    settings = _settings(rows)
    shares = {share for *_, share in settings}
    over_shares = len({row.step for row in rows}) == 1 < len(shares) and None not in shares
    groups = list(dict.fromkeys(setting[:3] for setting in settings)) if over_shares else settings
    places = [_place(row, over_shares) for row in rows]
    span = max(places) - min(places)
    for axis, title in zip(axes[0], ("reported", "corrected"), strict=True):
        for place, (color, group) in enumerate(zip(ordered_colours(len(groups)), groups, strict=True)):
            same = [row for row in rows if _setting(row)[: len(group)] == group]
            values = [row.gns if title == "reported" else _scale(row) for row in same]
            shift = 0.02 * span * (place - 0.5 * (len(groups) - 1))  # so that settings do not hide each other
            axis.plot([_place(row, over_shares) + shift for row in same], values, color=color, marker="o", markersize=4,
                      linestyle="none", label=_name(group, len(shares) > 1))  # fmt: skip
        axis.set_title(title, fontsize=10)
        axis.set_yscale("log")
        axis.set_xlabel(
            "share of the data behind the gradient norm (%)" if over_shares else "training step (settings side by side)"
        )
    axes[0, 0].set_ylabel(gns_plots.NOISE_SCALE)
    legend_outside(axes[0, 1])
    return gns_plots.save(figure, path)


def _place(row: PublishedRow, over_shares: bool) -> float:
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


def _scale(row: PublishedRow) -> float:
    signal, noise = corrected(row.gns, row.grad_norm, row.b, row.big_b, row.true_size)
    return noise / signal if signal else math.inf


def _bins(table: dict[Cell, float]) -> list[int]:
    return sorted({low for _, low in table if low is not None})


def _short(value: float | None) -> str:
    """Format three digits, or four before the point."""
    if value is None:
        return "–"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
