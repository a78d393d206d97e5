"""Pictures over the batch size: MFU, images/s and memory of every arm, and the end of each arm."""

import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes as Panel
from matplotlib.ticker import FixedLocator, NullLocator

from torchtitan.pictures.colours import SOFT
from torchtitan.pictures.style import PRINT_DPI, colour, error_bar, marker, new_figure, save
from torchtitan.runs.analysis.axes import BATCH, label, value_label, values_in_order, varying
from torchtitan.runs.analysis.cells import Cell, arms
from torchtitan.runs.analysis.measures import IMAGES, MEMORY, MFU, Metric

OVER_BATCH = (MFU, IMAGES, MEMORY)
STATUS_WORDS = {
    "oom": "OOM", "failed": "fail", "timeout": "time", "skipped": "skip", "refused": "refd", "damaged": "dmgd",
    "interrupted": "stop", "unfinished": "stop", "short": "short", "killed": "kill",
}
EXPLANATION = (
    "Filled: mean over repeats with its interval; hollow: a single repeat with the interval of its own points. Words "
    "above a panel, in an arm's colour: why there is no point at that batch (OOM: out of memory, skip: not tried after "
    "one, time: timeout, fail: failed, refd: refused, stop: interrupted, kill: killed, dmgd: damaged, short: too few steps; "
    "none: never run, though another arm was)."
)
_PANEL = (3.2, 2.3)  # inches
_SLUG_LENGTH = 120
_HEADROOM = 1.08  # of the vertical axis over the highest value, for its mark


def draw_over_batch(cells: Sequence[Cell], folder: Path) -> list[tuple[str, Path]]:
    """Draw one picture per metric, model, number of ranks and other varying axes; rows are layouts, columns patches.

    A single batch size gives no picture.

    Returns:
        title and file of each.
    """
    drawn = []
    names = varying([cell.axes for cell in cells])
    columns = next((name for name in ("patch", "dtype") if name in names), "patch")
    rows = next((name for name in ("layout", "dtype") if name in names and name != columns), "layout")
    lines: list[str] = [name for name in ("ac", "compile") if name in names]
    inside = {*BATCH, "mesh", columns, rows, *lines}
    outside = [name for name in names if name not in inside]
    figures: dict[tuple, list[Cell]] = {}
    for cell in cells:
        if cell.axes["local_batch"]:
            figures.setdefault(tuple(cell.axes.get(name) for name in outside), []).append(cell)
    taken: set[str] = set()
    endings = {key: f"_{_slug(label(members[0].axes, outside), taken)}" if outside else "" for key, members in figures.items()}
    for metric in OVER_BATCH:
        for key, members in figures.items():
            several = len({cell.axes["local_batch"] for cell in members}) > 1
            if not several or not any(metric.name in cell.measures for cell in members):
                continue
            where = label(members[0].axes, dict.fromkeys(("model", *outside)))
            name = f"{metric.name}_over_batch{endings[key]}"
            title = f"{metric.title.split(',')[0]} over batch size: {where}"
            drawn.append((title, _draw(members, metric, title, rows, columns, lines, folder / f"{name}.png")))
    return drawn


def _draw(
    cells: list[Cell], metric: Metric, title: str, rows: str, columns: str, lines: list[str], path: Path
) -> Path:
    down = values_in_order(rows, {cell.axes.get(rows) for cell in cells}) or [None]
    across = values_in_order(columns, {cell.axes.get(columns) for cell in cells}) or [None]
    places = [values_in_order(name, {cell.axes.get(name) for cell in cells}) for name in lines]
    kinds = sorted(
        {tuple(cell.axes.get(name) for name in lines) for cell in cells},
        key=lambda kind: [-1 if value is None else place.index(value) for place, value in zip(places, kind, strict=True)],
    )
    size = (2.6 + (_PANEL[0] + 0.4) * len(across), 0.9 + (_PANEL[1] + 0.5) * len(down))
    share = True if metric is MFU else "col"
    figure, panels = new_figure(title, len(down), len(across), size, sharey=share, sharex="col")
    batches = {
        column: sorted({cell.axes["local_batch"] for cell in cells if cell.axes.get(columns) == column})
        for column in across
    }
    for i, row in enumerate(down):
        for j, column in enumerate(across):
            chosen = [cell for cell in cells if (cell.axes.get(rows), cell.axes.get(columns)) == (row, column)]
            words = [value_label(name, value) for name, value in ((rows, row), (columns, column)) if value is not None]
            _draw_arms(panels[i][j], chosen, metric, kinds, lines, batches[column], ", ".join(words))
        panels[i][0].set_ylabel(metric.title)
    for j, column in enumerate(across):
        _batch_axis([panel_row[j] for panel_row in panels], batches[column])
    for n, kind in enumerate(kinds if lines else []):
        text, (style, _) = label(dict(zip(lines, kind, strict=True)), lines), _line_style(n)
        panels[0][0].plot([], [], color=colour(n), marker=marker(n), linestyle=style, label=text)
    if lines:
        figure.legend(loc="outside right upper", fontsize=8.5, frameon=False)
    return save(figure, path, PRINT_DPI)


def _draw_arms(
    panel: Panel, cells: list[Cell], metric: Metric, kinds: list[tuple], lines: list[str], batches: list[int], title: str
) -> None:
    lanes = 0
    for arm in arms(cells).values():
        n = kinds.index(tuple(arm[0].axes.get(name) for name in lines))
        if any(metric.name in cell.measures for cell in arm):
            _draw_line(panel, arm, metric.name, n)
        lanes += _draw_statuses(panel, arm, batches, colour(n), lanes)
    there = {tuple(cell.axes.get(name) for name in lines) for cell in cells}
    for n in (n for n, kind in enumerate(kinds) if cells and kind not in there):
        lanes += _draw_statuses(panel, [], batches, colour(n), lanes)
    if not cells:
        panel.text(0.5, 0.5, "never run", transform=panel.transAxes, ha="center", color=SOFT, fontsize=9)
    panel.set_title(title, fontsize=9, pad=4 + 9 * lanes, loc="left")


def _draw_line(panel: Panel, arm: list[Cell], metric: str, n: int) -> None:
    """Draw a line through the measured cells of an arm, broken where one is not."""
    style, size = _line_style(n)
    xs = [cell.axes["local_batch"] for cell in arm]
    estimates = [cell.measures.get(metric) for cell in arm]
    values = [estimate.value if estimate else float("nan") for estimate in estimates]
    below, above = zip(*map(error_bar, estimates), strict=True)
    panel.errorbar(xs, values, yerr=[below, above], color=colour(n), linestyle=style, linewidth=1.8, capsize=2)
    for x, y, cell in zip(xs, values, arm, strict=True):
        face = "white" if cell.single else colour(n)
        panel.plot([x], [y], marker=marker(n), color=colour(n), markerfacecolor=face, markersize=size, linestyle="")


def _line_style(n: int) -> tuple[Any, float]:
    """Style of a line and size of its marks: every second arm is dashed and smaller, so that overlapping ones stay visible."""
    return ("-", 6.5) if n % 2 == 0 else ((0, (4, 3)), 4.0)


def _draw_statuses(panel: Panel, arm: list[Cell], batches: list[int], color: str, lane: int) -> int:
    """Write above the panel why an arm has no point at a batch; return the number of lanes used: 0 or 1."""
    there = {cell.axes["local_batch"]: cell for cell in arm}
    words = {batch: STATUS_WORDS.get(cell.status, cell.status) for batch, cell in there.items() if not cell.ok}
    words |= {batch: "none" for batch in batches if batch not in there}
    for batch, word in words.items():
        panel.annotate(
            word, (batch, 1), xycoords=("data", "axes fraction"), xytext=(0, 3 + 9 * lane), textcoords="offset points",
            ha="center", fontsize=6.5, color=color, annotation_clip=False,
        )
    return 1 if words else 0


def _batch_axis(panels: list[Panel], batches: list[int]) -> None:
    for panel in panels:
        panel.set_xscale("log", base=2)
        panel.set_xlim(batches[0] / 1.25, batches[-1] * 1.25)
        panel.xaxis.set_major_locator(FixedLocator(batches))
        panel.xaxis.set_minor_locator(NullLocator())
        panel.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        _, high = panel.get_ylim()
        panel.set_ylim(0, max(high, _HEADROOM * panel.dataLim.ymax))  # shared among panels: it can only grow
    panels[-1].set_xlabel("batch per process")


def _slug(text: str, taken: set[str]) -> str:
    """Make a file name's part of a text, cut between words, and numbered where the cut has made it one of `taken`."""
    words = re.sub(r"[^A-Za-z0-9.=-]+", "-", text).strip("-")
    if len(words) > _SLUG_LENGTH:
        words = words[:_SLUG_LENGTH].rpartition("-")[0] or words[:_SLUG_LENGTH]
    found = next(name for number in itertools.count(1) if (name := words if number == 1 else f"{words}-{number}") not in taken)
    taken.add(found)
    return found
