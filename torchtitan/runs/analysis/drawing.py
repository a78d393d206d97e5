"""What the pictures of the analysis share: lines with intervals, places of axis values, names of files."""

import re
import textwrap
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
from matplotlib.axes import Axes as Panel
from matplotlib.container import ErrorbarContainer
from matplotlib.markers import CARETDOWN, CARETUP
from matplotlib.ticker import FixedLocator, NullLocator

from torchtitan.pictures.style import error_bar, marker
from torchtitan.runs.analysis.axes import Axes, label, values_in_order, varying
from torchtitan.statistics.interval import Interval

T = TypeVar("T")

PANEL = (3.2, 2.3)  # inches
MARKS = "Filled: mean over repeats with its interval; hollow: one run, with that of its points if any. Arrows: longer intervals."
_MARGIN = 0.05  # of a vertical axis beyond its values
_LEAST_ROOM = 0.05  # for intervals, as a part of the values
_LEAST_SPAN = 0.01  # of a vertical axis, as a part of its values: a flat line is not enlarged to its noise
_WORDS = 22  # characters of a file's name for what distinguishes its picture


def values_of(axes: Axes, names: Sequence[str]) -> tuple:
    return tuple(axes.get(name) for name in names)


def combinations(all_axes: Sequence[Axes], names: Sequence[str]) -> list[tuple]:
    """Combinations of the values of some axes, in their order; an unknown value comes first."""
    places = [values_in_order(name, {axes.get(name) for axes in all_axes}) for name in names]
    return sorted(
        {values_of(axes, names) for axes in all_axes},
        key=lambda found: [-1 if value is None else place.index(value) for place, value in zip(places, found, strict=True)],
    )


def divided(items: Sequence[T], all_axes: Sequence[Axes], inside: Sequence[str] = ()) -> list[tuple[str, str, list[T]]]:
    """Divide what is drawn among pictures, by all varying axes but those `inside` a picture.

    Returns:
        of each picture its model and varying axes in words; the end of its file's name, which is its number and the fewest
        words that tell, or nothing where there is one picture; and its items.
    """
    names = [name for name in varying(all_axes) if name not in inside]
    found = combinations(all_axes, names)
    kept = list(names)
    for name in sorted(names, key=len, reverse=True):
        fewer = [other for other in kept if other != name]
        if len(combinations(all_axes, fewer)) == len(found):
            kept = fewer
    shown = dict.fromkeys(name for axes in all_axes for name in axes if name in ("model", *names))
    parts = []
    for number, values in enumerate(found, 1):
        there = [(item, axes) for item, axes in zip(items, all_axes, strict=True) if values_of(axes, names) == values]
        axes = there[0][1]
        words = re.sub(r"(?:\w+\.)+(?=\w+=)|[^A-Za-z0-9.=_]", " ", label(axes, kept).replace(".enable=", "="))
        ending = f"_{number}_{textwrap.shorten(words, _WORDS, placeholder='').replace(' ', '-')}".rstrip("_") if kept else ""
        parts.append((label(axes, shown), ending, [item for item, _ in there]))
    return parts


def draw_marks(
    panel: Panel, xs: Sequence[float], estimates: Sequence[Interval | None], hollow: Sequence[bool], color: str, n: int,
    linestyle: Any,
) -> None:
    """Draw values with their intervals and a line through them, broken where one is missing."""
    values = [estimate.value if estimate else float("nan") for estimate in estimates]
    below, above = zip(*map(error_bar, estimates), strict=True)
    panel.errorbar(xs, values, yerr=[below, above], color=color, linestyle=linestyle, linewidth=1.8, capsize=2)
    mark = mark_of(n)
    for x, y, empty in zip(xs, values, hollow, strict=True):
        face = "white" if empty else color
        panel.plot([x], [y], **mark, color=color, markerfacecolor=face, linestyle="", zorder=9 - mark["markersize"])


def mark_of(n: int) -> dict[str, Any]:
    """Mark of the n-th kind of cells; every second is small, so that overlapping ones stay visible."""
    return {"marker": marker(n), "markersize": 6.5 if n % 2 == 0 else 4.0}


def dash_of(n: int) -> Any:
    """Style of the n-th kind's line, which shows another below it."""
    return "-" if n % 2 == 0 else (0, (4, 3))


def frame_values(panels: Sequence[Panel]) -> None:
    """Scale the vertical axis of panels by their values and half of the values' span beyond; longer intervals end in arrows."""
    log = panels[0].get_yscale() == "log"
    to, back = (np.log, np.exp) if log else (np.positive, np.positive)
    drawn = [(panel, each) for panel in panels for each in panel.containers if isinstance(each, ErrorbarContainer)]
    caps = [cap for _, each in drawn for cap in each.lines[1]]
    lines = [line for panel in panels for line in panel.lines if line not in caps]
    values = to(np.concatenate([[], *(line.get_ydata(orig=False) for line in lines)]))
    if not np.isfinite(values).any():
        return
    bars = [(panel, each.lines[0], bar) for panel, each in drawn for bar in each.lines[2][0].get_segments() if len(bar)]
    low, high = np.nanmin(values), np.nanmax(values)
    size = 1.0 if log else high
    room = max(0.5 * (high - low), _LEAST_ROOM * size)
    ends = to([back(low), back(high), *(y for *_, bar in bars for y in bar[:, 1])])
    low, high = max(np.nanmin(ends), low - room), min(np.nanmax(ends), high + room)
    margin = max(_MARGIN * (high - low), (_LEAST_SPAN * size - (high - low)) / 2)
    low, high = back(low - margin), back(high + margin)
    panels[0].set_ylim(low, high)
    for panel, line, ((x, start), (_, end)) in bars:
        for beyond, y, shape in ((start < low, low, CARETDOWN), (end > high, high, CARETUP)):
            if beyond:
                panel.plot([x], [y], marker=shape, color=line.get_color(), markersize=5, linestyle="", clip_on=False)


def power_axis(panel: Panel, places: Sequence[int]) -> None:
    """Label a logarithmic horizontal axis at the places of the points alone."""
    panel.ticklabel_format(axis="y", useOffset=False)
    panel.set_xscale("log", base=2)
    panel.set_xlim(places[0] / 1.25, places[-1] * 1.25)
    panel.xaxis.set_major_locator(FixedLocator(places))
    panel.xaxis.set_minor_locator(NullLocator())
    panel.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
