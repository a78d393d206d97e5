"""Pictures over the batch size: MFU, images/s and memory of every arm, and the end of each arm."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes as Panel
from matplotlib.transforms import offset_copy

from torchtitan.pictures.colours import SOFT
from torchtitan.pictures.number_text import first_named, significant
from torchtitan.pictures.style import PRINT_DPI, colour, new_figure, note, save
from torchtitan.runs.analysis.axes import BATCH, label, varying
from torchtitan.runs.analysis.cells import Cell, arms
from torchtitan.runs.analysis.drawing import (
    MARKS,
    PANEL,
    combinations,
    dash_of,
    divided,
    draw_marks,
    frame_values,
    mark_of,
    power_axis,
    values_of,
)
from torchtitan.runs.analysis.measures import IMAGES, MEMORY, MFU, Metric

OVER_BATCH = (MFU, IMAGES, MEMORY)
_MEMORY_NOTE = (
    " Line, from three batches on: fit of the peak, the part without images (parameters, gradients, optimizer, "
    "averages; of a process on a CPU all else too) and that of each image (activations)."
)
_SEVERAL = " Of several global batches at one local batch the fastest counts."
_FEWEST_TO_FIT = 3  # batches


@dataclass(frozen=True)
class _Grid:
    """Axes that distinguish the columns, the rows and the lines of a picture."""

    columns: Sequence[str]
    rows: Sequence[str]
    lines: Sequence[str]


def draw_over_batch(cells: Sequence[Cell], folder: Path, remarks: list[str]) -> list[tuple[str, Path]]:
    """Draw one picture per metric, model and other varying axes; layouts are lines of one panel.

    A single batch size gives no picture, of which `remarks` gets a line where there are others, and runs without a value no
    panel.

    Returns:
        title and file of each.
    """
    names = varying([cell.axes for cell in cells])
    columns = next((name for name in ("patch", "world_size", "dtype") if name in names), "patch")
    switches = [name for name in ("ac", "compile", "dtype") if name in names and name != columns]
    grid = _Grid([columns], switches, ["layout"]) if "layout" in names else _Grid([columns], [], switches)
    inside = (*BATCH, "mesh", *grid.columns, *grid.rows, *grid.lines)
    drawn = []
    known = [cell for cell in cells if cell.axes["local_batch"]]
    kinds = combinations([cell.axes for cell in cells], grid.lines)
    parts = divided(known, [cell.axes for cell in known], inside)
    alone = [where for where, _, members in parts if len({cell.axes["local_batch"] for cell in members}) == 1]
    if 0 < len(alone) < len(parts):
        remarks.append(f"Not drawn over the batch size, as there is one batch size: {first_named(alone, 3)}.")
    for metric, (where, ending, members) in itertools.product(OVER_BATCH, parts):
        several = len({cell.axes["local_batch"] for cell in members}) > 1
        if several and any(metric.name in cell.measures for cell in members):
            title = f"{metric.title.split(',')[0]} over batch size: {where}"
            path = folder / f"{metric.name}_over_batch{ending}.png"
            drawn.append((title, _draw(members, metric, title, grid, kinds, path)))
    return drawn


def _draw(cells: list[Cell], metric: Metric, title: str, grid: _Grid, kinds: list[tuple], path: Path) -> Path:
    shown = [cell.axes for cell in cells if metric.name in cell.measures or not cell.ok]
    across, down = combinations(shown, grid.columns), combinations(shown, grid.rows)
    every, cells = cells, _fastest(cells, metric)
    below = 0.15 * len(kinds) if metric is MEMORY else 0.0  # of each panel's legend
    size = (2.6 + (PANEL[0] + 0.8) * len(across), 1.2 + (PANEL[1] + 0.5 + below) * len(down))
    figure, panels = new_figure(title, len(down), len(across), size, sharey=True, sharex="col")
    for j, column in enumerate(across):
        of_column = [cell for cell in cells if values_of(cell.axes, grid.columns) == column]
        batches = sorted({cell.axes["local_batch"] for cell in of_column})
        for panel, row in zip(panels[:, j], down, strict=True):
            chosen = [cell for cell in of_column if values_of(cell.axes, grid.rows) == row]
            words = dict(zip([*grid.rows, *grid.columns], [*row, *column], strict=True))
            title = label(words, [name for name, value in words.items() if value is not None])
            tried = {values_of(cell.axes, grid.lines) for cell in of_column}
            _draw_arms(panel, chosen, metric, [kind if kind in tried else None for kind in kinds], grid.lines, batches, title)
            power_axis(panel, batches)
            panel.set_ylabel(f"{metric.title} per process" if metric is IMAGES else metric.title)
        panels[-1, j].set_xlabel("local batch: images of a forward on a process")
        for panel in (panel for panel in panels[:, j] if metric is MEMORY and panel.get_legend_handles_labels()[0]):
            place = offset_copy(panel.transAxes, figure, y=-34 if panel is panels[-1, j] else -4, units="points")
            under: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (0, 0), "bbox_transform": place, "borderaxespad": 0}
            panel.legend(fontsize=6.5, frameon=False, **under)
    frame_values(list(panels.flat))
    drawn = {values_of(axes, grid.lines) for axes in shown}
    for n, kind in (each for each in enumerate(kinds) if grid.lines and metric is not MEMORY and each[1] in drawn):
        name = label(dict(zip(grid.lines, kind, strict=True)), grid.lines)
        panels[0, 0].plot([], [], color=colour(n), **mark_of(n), linestyle=dash_of(n), label=name)
    if grid.lines and metric is not MEMORY:
        figure.legend(loc="outside right center", fontsize=8.5, frameon=False)
    note(figure, MARKS + _SEVERAL * (len(cells) < len(every)) + _MEMORY_NOTE * (metric is MEMORY))
    return save(figure, path, PRINT_DPI)


def _fastest(cells: list[Cell], metric: Metric) -> list[Cell]:
    """Of the cells of an arm at one local batch, which differ in their global batch, the fastest with a value."""
    rising = sorted(cells, key=lambda cell: (metric.name in cell.measures, cell.value(IMAGES.name) or 0.0))
    return list({tuple(cell.axes[name] for name in cell.axes if name != "global_batch"): cell for cell in rising}.values())


def _draw_arms(
    panel: Panel, cells: list[Cell], metric: Metric, kinds: Sequence[tuple | None], lines: Sequence[str],
    batches: list[int], title: str,
) -> None:
    lanes = 0
    for arm in arms(cells).values():
        n = kinds.index(values_of(arm[0].axes, lines))
        if any(metric.name in cell.measures for cell in arm):
            _draw_line(panel, arm, metric, n, label(arm[0].axes, lines))
        lanes += _draw_statuses(panel, arm, batches, colour(n), lanes)
    there = {values_of(cell.axes, lines) for cell in cells}
    for n in (n for n, kind in enumerate(kinds) if cells and kind and kind not in there):
        lanes += _draw_statuses(panel, [], batches, colour(n), lanes)
    if all(cell.ok and metric.name not in cell.measures for cell in cells):
        text = "not known" if cells else "never run"
        panel.text(0.5, 0.5, text, transform=panel.transAxes, ha="center", color=SOFT, fontsize=9)
    panel.set_title(title, fontsize=9, pad=4 + 9 * lanes, loc="left")
    ranks = {cell.axes["world_size"] or 1 for cell in cells}
    if metric is IMAGES and len(ranks) == 1 and (count := ranks.pop()) > 1:
        whole = panel.secondary_yaxis("right", functions=(partial(np.multiply, count), partial(np.multiply, 1 / count)))
        whole.set_ylabel(f"of all {count}", fontsize=9)
        whole.tick_params(labelsize=8, colors=SOFT)


def _draw_line(panel: Panel, arm: list[Cell], metric: Metric, n: int, name: str) -> None:
    """Draw the measured cells of an arm with a line through them; of memory the fitted one."""
    xs = [cell.axes["local_batch"] for cell in arm]
    estimates = [cell.shown(metric) for cell in arm]
    if metric is IMAGES:
        estimates = [each and each.scaled(1 / (cell.axes["world_size"] or 1)) for each, cell in zip(estimates, arm, strict=True)]
    fit = fit_memory(arm) if metric is MEMORY else None
    style = "none" if metric is MEMORY else dash_of(n)
    draw_marks(panel, xs, estimates, [cell.single for cell in arm], colour(n), n, style)
    if metric is MEMORY:
        fixed, slope = fit or (float("nan"),) * 2
        grows = f"+ {significant(1024 * slope, 3)} MiB an image" if slope > 0 else "at any batch"
        parts = f"{significant(fixed, 3)} GiB {grows}" if fit else "too few batches to fit"
        measured = [x for x, each in zip(xs, estimates, strict=True) if each]
        places = np.geomspace(measured[0], measured[-1], 50)
        panel.plot(places, fixed + slope * places, color=colour(n), linewidth=1.4, label=f"{name}: {parts}" if name else parts)


def fit_memory(arm: Sequence[Cell]) -> tuple[float, float] | None:
    """Fit the peak memory of an arm by a line over the batch: GiB without images, GiB of each image; least squares.

    None where fewer than three batches are measured.
    """
    points = {cell.axes["local_batch"]: cell.measures[MEMORY.name].value for cell in arm if MEMORY.name in cell.measures}
    if len(points) < _FEWEST_TO_FIT:
        return None
    slope, fixed = np.polyfit(list(points), list(points.values()), 1)
    return (float(fixed), float(slope)) if slope > 0 else (float(np.mean(list(points.values()))), 0.0)


def _draw_statuses(panel: Panel, arm: list[Cell], batches: list[int], color: str, lane: int) -> int:
    """Write above the panel why an arm has no point at a batch; return the number of lanes used: 0 or 1."""
    there = {cell.axes["local_batch"]: cell for cell in arm}
    words = {batch: cell.status for batch, cell in there.items() if not cell.ok}
    words |= {batch: "not run" for batch in batches if batch not in there}
    for batch, word in words.items():
        panel.annotate(
            word, (batch, 1), xycoords=("data", "axes fraction"), xytext=(0, 3 + 9 * lane), textcoords="offset points",
            ha="center", fontsize=6.5, color=color, annotation_clip=False,
        )
    return 1 if words else 0
