"""Plots of noise scales: intervals as bands or bars, unbounded ones as arrows from their lower end."""

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullFormatter
from matplotlib.transforms import ScaledTranslation

from research.cells import Row
from research.frame import number
from research.gns_cells import bin_label, good, is_unbounded
from torchtitan.pictures.number_text import counted

NOISE_SCALE = "estimate of the gradient noise scale (samples)"
ARROW = "arrow: interval without an upper end, from its lower end"


def draw_line(axes: Axes, xs: Sequence[float], rows: Sequence[Row], color, label: str, shift: float = 0.0) -> None:
    """Draw estimates over x: a line with markers, a band from lower to upper, arrows where there is no upper end.

    Arrows and single intervals stand `shift` points to the right: those of several lines must not hide each other.
    """
    beside = axes.transData + ScaledTranslation(shift / 72, 0, axes.figure.dpi_scale_trans)
    values, lower, upper = (
        [number(row, name) if row["status"] == "ok" and not is_unbounded(row) else float("nan") for row in rows]
        for name in ("gns_est", "lower", "upper")
    )
    alone = [_alone(values, place) for place in range(len(rows))]
    on_line = [float("nan") if single else value for value, single in zip(values, alone, strict=True)]
    axes.plot(xs, on_line, color=color, marker="o", markersize=4, linewidth=1.6, label=label)
    axes.fill_between(xs, lower, upper, color=color, alpha=0.15, linewidth=0)
    for place, (x, row) in enumerate(zip(xs, rows, strict=True)):
        if row["status"] == "ok" and is_unbounded(row):
            draw_arrow(axes, x, number(row, "lower"), color, shift=shift)
        elif alone[place] and not math.isnan(values[place]):
            axes.vlines(x, lower[place], upper[place], color=color, linewidth=1.2, transform=beside)
            axes.plot([x], [values[place]], color=color, marker="o", markersize=4, transform=beside)
    # Marks without an estimate belong into the picture too.
    axes.update_datalim([(x, 1.0) for x in xs], updatey=False)
    axes.margins(x=0.08)


def draw_bars(axes: Axes, rows: Sequence[Row], colors: Sequence) -> None:
    """Draw one bar per row from the left, its interval across its end."""
    axes.barh(
        range(len(rows)), [0 if is_unbounded(row) or row["status"] != "ok" else number(row, "gns_est") for row in rows],
        color=list(colors), height=0.72,
    )  # fmt: skip
    for place, row in enumerate(rows):
        if row["status"] != "ok":
            axes.text(0.01, place, "failed", transform=axes.get_yaxis_transform(), va="center", fontsize=8, color="0.4")
        elif is_unbounded(row):
            draw_arrow(axes, number(row, "lower"), place, colors[place], sideways=True)
        elif row["lower"]:
            axes.hlines(place, number(row, "lower"), number(row, "upper"), color="black", linewidth=1.2)
    axes.set_yticks(range(len(rows)), [bin_label(row) for row in rows], fontsize=8)
    axes.invert_yaxis()


def shifts(count: int) -> list[float]:
    """Offsets of several lines' arrows from each other, in points."""
    step = min(6.0, 40.0 / max(count, 1))
    return [step * (place - 0.5 * (count - 1)) for place in range(count)]


def draw_arrow(axes: Axes, x: float, y: float, color, sideways: bool = False, shift: float = 0.0) -> None:
    """Draw an arrow up (or to the right) from the lower end, or from the axis where that is not positive."""
    place, coordinates = (x, y), axes.transData
    along = x if sideways else y
    if not (along > 0 and math.isfinite(along)):
        place = (0.0, y) if sideways else (x, 0.0)
        coordinates = axes.get_yaxis_transform() if sideways else axes.get_xaxis_transform()
    coordinates = coordinates + ScaledTranslation(shift / 72, 0, axes.figure.dpi_scale_trans)
    style = {"arrowstyle": "<-", "color": color, "linewidth": 1.8, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", place, (22, 0) if sideways else (0, 22), coordinates, "offset points", arrowprops=style)


def set_scale(axes: Axes, rows: Sequence[Row], scale: str, along: str = "y") -> None:
    """Set the scale: linear from 0, or logarithmic, with all estimates and finite ends of intervals within."""
    bounded = [row for row in good(rows) if not is_unbounded(row)]
    estimates = [value for row in bounded if (value := number(row, "gns_est")) > 0]
    starts = [value for row in good(rows) if (value := number(row, "lower")) > 0]
    ends = [value for row in bounded if (value := number(row, "upper")) > 0]
    unbounded = [value for row in good(rows) if is_unbounded(row) and (value := number(row, "lower")) > 0]
    must_be_seen = [*estimates, *unbounded] or [1.0]
    # One wide interval must not flatten everything else: its end may leave the picture.
    roof = max(must_be_seen) * (8 if scale == "log" else 2)
    top = max([min(max(ends, default=0.0), roof), *must_be_seen, *(1.5 * start for start in unbounded)])
    set_limits = axes.set_ylim if along == "y" else axes.set_xlim
    if scale == "log":
        floor = min([*must_be_seen, max(min(starts, default=top), 1e-3 * top)])
        set_limits(floor / 1.5, top * 1.6)  # before the scale, which else looks for limits in data that may all be 0
        (axes.set_yscale if along == "y" else axes.set_xscale)("log")
        of_axis = axes.yaxis if along == "y" else axes.xaxis
        of_axis.set_major_locator(LogLocator(subs=(1, 2, 5) if top < 100 * floor else (1,)))
        of_axis.set_major_formatter("{x:g}")
        of_axis.set_minor_formatter(NullFormatter())
    else:
        set_limits(0, top * 1.08)


def _alone(values: Sequence[float], place: int) -> bool:
    """Check whether a point has no neighbour to draw a band to."""
    neighbours = [values[other] for other in (place - 1, place + 1) if 0 <= other < len(values)]
    return all(math.isnan(value) for value in neighbours)


def caption(rows: Sequence[Row]) -> str:
    """Caption: kind of the intervals, and the marks of missing ones."""
    parts = []
    if any(row["estimator"] == "published" for row in rows):
        parts.append("published estimator with its two errors: for comparison only, no intervals")
    else:
        parts.append("bands and bars: 95 % intervals")
    if any(is_unbounded(row) for row in good(rows)):
        parts.append(ARROW)
    failed = sum(row["status"] != "ok" for row in rows)
    if failed:
        parts.append(f"{failed} of {counted(len(rows), 'cell')} failed and are missing")
    return "; ".join(parts)
