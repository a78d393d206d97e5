"""Pictures over the number of processes: MFU and images/s, of each process and of all, with linear scaling."""

from collections.abc import Callable, Sequence
from pathlib import Path

from torchtitan.pictures.colours import SOFT
from torchtitan.pictures.number_text import short
from torchtitan.pictures.style import PRINT_DPI, colour, dashes, label_log_axis, new_figure, note, save
from torchtitan.runs.analysis.axes import BATCH, label, varying
from torchtitan.runs.analysis.cells import Cell
from torchtitan.runs.analysis.drawing import (
    MARKS,
    PANEL,
    combinations,
    divided,
    draw_marks,
    frame_values,
    mark_of,
    power_axis,
    values_of,
)
from torchtitan.runs.analysis.effects import ScalingCurve, ScalingPoint
from torchtitan.runs.analysis.measures import IMAGES, MFU
from torchtitan.statistics.interval import Interval

_WHOLE = "images/s of all"
_COLUMNS: dict[str, Callable[[ScalingPoint], Interval | None]] = {
    MFU.title: lambda point: point.cell.shown(MFU),
    "images/s per process": lambda point: point.cell.measures[IMAGES.name].scaled(1 / point.ranks),
    _WHOLE: lambda point: point.cell.measures[IMAGES.name],
}
_IDEAL = {"color": SOFT, "linewidth": 0.8, "linestyle": "-", "zorder": 1}


def draw_over_ranks(curves: Sequence[ScalingCurve], cells: Sequence[Cell], folder: Path) -> list[tuple[str, Path]]:
    """Draw weak and strong scaling, per model and other varying axes; layouts and batches are lines of one panel.

    Args:
        cells: all of the report, where a layout has one colour.

    Returns:
        title and file of each.
    """
    layouts = combinations([cell.axes for cell in cells], ["layout"])
    rows = [name for name in ("patch", "ac", "compile", "dtype") if name in varying([curve.axes for curve in curves])]
    inside = (*BATCH, "layout", "mesh", "world_size", *rows)
    drawn = []
    for where, ending, every in divided(curves, [curve.axes for curve in curves], inside):
        for kind, equal in (("weak", "images of a step on each"), ("strong", "global batch")):
            if members := [curve for curve in every if curve.kind == kind]:
                title = f"{kind.capitalize()} scaling over processes, equal {equal}: {where}"
                drawn.append((title, _draw(members, title, rows, layouts, folder / f"{kind}_scaling_over_ranks{ending}.png")))
    return drawn


def _draw(curves: list[ScalingCurve], title: str, rows: Sequence[str], layouts: Sequence[tuple], path: Path) -> Path:
    all_axes = [curve.axes for curve in curves]
    down = combinations(all_axes, rows)
    batches = {curve.work: curve.batch for curve in sorted(curves, key=lambda curve: curve.work)}
    points = [point for curve in curves for point in curve.points]
    columns = {name: each for name, each in _COLUMNS.items() if any(map(each, points))}
    ranks = sorted({point.ranks for point in points})
    size = (3 + (PANEL[0] + 0.4) * len(columns), 1.2 + (PANEL[1] + 0.5) * len(down))
    figure, panels = new_figure(title, len(down), len(columns), size, sharex=True)
    for row, in_row in zip(down, panels, strict=True):
        in_row[0].set_title(label(dict(zip(rows, row, strict=True)), rows), fontsize=9, loc="left")
        for panel, (name, estimate_of) in zip(in_row, columns.items(), strict=True):
            for curve in (curve for curve in curves if values_of(curve.axes, rows) == row):
                xs, estimates = [point.ranks for point in curve.points], [estimate_of(point) for point in curve.points]
                n, dash = layouts.index((curve.axes["layout"],)), dashes(8 * [*batches].index(curve.work))
                draw_marks(panel, xs, estimates, [point.cell.single for point in curve.points], colour(n), n, dash)
                if first := estimates[0]:
                    end = first.value * (xs[-1] / xs[0] if name == _WHOLE else 1)
                    panel.plot([xs[0], xs[-1]], [first.value, end], **_IDEAL)
            power_axis(panel, ranks)
            panel.set_ylabel(name)
            if name == _WHOLE:
                panel.set_yscale("log")
            frame_values([panel])
        label_log_axis(in_row[-1].yaxis)
        in_row[-1].yaxis.set_major_formatter(lambda value, _: short(value))
    for panel in panels[-1]:
        panel.set_xlabel("processes")
    for n, layout in enumerate(layouts):
        if layout in {values_of(axes, ["layout"]) for axes in all_axes}:
            panels[0, 0].plot([], [], color=colour(n), **mark_of(n), label=layout[0])
    for n, batch in enumerate(batches.values() if len(batches) > 1 else []):
        panels[0, 0].plot([], [], color=SOFT, linestyle=dashes(8 * n), label=batch)
    panels[0, 0].plot([], [], **_IDEAL, label="linear scaling")
    figure.legend(loc="outside right center", fontsize=8.5, frameon=False)
    note(figure, MARKS)
    return save(figure, path, PRINT_DPI)
