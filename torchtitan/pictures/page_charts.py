"""Charts of HTML pages: matplotlib's SVG in the page's colours, with names on hover and classes to hide groups by."""

import hashlib
import io
import re
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import Any

from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, ScalarFormatter

from torchtitan.pictures.colours import COLOURS, LINE, SOFT
from torchtitan.pictures.number_text import short, significant
from torchtitan.pictures.style import STYLE, colour, dashes, label_log_axis

Point = tuple[float, float]

MOST_POINTS = 400  # drawn of one line
_LONGEST_NAME = 26  # characters beside a bar
_FONT_SIZE = 12  # pixels
_STYLE = STYLE | dict.fromkeys(("axes.labelsize", "xtick.labelsize", "ytick.labelsize"), _FONT_SIZE)
_STYLE |= {"axes.labelcolor": SOFT, "axes.labelpad": 8}  # room for numbers that a telephone enlarges
_NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))
# A page names its colours, so that it can be dark.
_NAMES = {SOFT: "var(--soft)", LINE: "var(--line)", "#000000": "var(--ink)"}
_NAMES |= {value: f"var(--c{n})" for n, value in enumerate(COLOURS)}


@dataclass(frozen=True)
class Line:
    """Line of a chart: points (x, y), x rising, and a band (x, low, high) around it."""

    points: Sequence[Point]
    group: int
    name: str
    faint: bool = False
    band: Sequence[tuple[float, float, float]] = ()
    marked: bool = False


@dataclass(frozen=True)
class Step:
    """Value of a timestep bin from `start` to `end`, with the ends of its whisker."""

    start: float
    end: float
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Bar:
    """Bar with a whisker over its spread; `value` None is shown as missing."""

    name: str
    group: int
    value: float | None
    low: float = 0.0
    high: float = 0.0


class _Chart:
    """Panel within margins (left, top, right, bottom), all in pixels."""

    def __init__(self, width: float, height: float, margins: tuple[float, float, float, float]) -> None:
        left, top, right, bottom = margins
        inner = (left / width, bottom / height, 1 - (left + right) / width, 1 - (top + bottom) / height)
        self._size = width, height
        self._tags: list[str] = []
        with rc_context(_STYLE):
            self._figure = Figure(figsize=(width / 72, height / 72), facecolor="none")
            self.panel = self._figure.add_axes(inner, facecolor="none")

    def set_axes(self, x_values: Sequence[float], y_values: Sequence[float], log: bool, ticks: int) -> None:
        """Span the values, x without a margin; `ticks` at most on each axis."""
        log = log and min(y_values) > 0
        if log:
            self.panel.set_yscale("log")
        self.panel.set_xlim(_span(x_values, margin=0.0))
        self.panel.set_ylim(_span(y_values, margin=0.05, log=log))
        self.panel.grid(axis="x", visible=False)
        self.panel.xaxis.set_major_locator(MaxNLocator(ticks, steps=[1, 2, 5, 10]))
        self.panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
        if log:
            label_log_axis(self.panel.yaxis)
        else:
            self.panel.yaxis.set_major_locator(MaxNLocator(ticks, steps=[1, 2, 5, 10]))
            self.panel.yaxis.set_major_formatter(ScalarFormatter(useOffset=False))

    def inside(self, y: float) -> float:
        """Clamp a value to the axis: nothing is clipped."""
        bottom, top = self.panel.get_ylim()
        return min(max(y, bottom), top)

    def tag(self, artist: Artist, group: int, name: str | None = None) -> None:
        """Make an artist hide with its group, and show a name on hover."""
        artist.set_gid(f"tagged-{len(self._tags)}")
        title = f"<title>{escape(name)}</title>" if name else ""
        self._tags.append(f'<g class="g{group}">{title}')

    def svg(self, label: str) -> Markup:
        content = io.StringIO()
        with rc_context({"svg.fonttype": "none", "svg.hashsalt": "page"}), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph .* missing")  # the browser has more fonts
            self._figure.savefig(content, format="svg", metadata=_NO_METADATA)
        text = " ".join(content.getvalue().partition("</defs>")[2].rpartition("</svg>")[0].split()).replace("> <", "><")
        for number, start in enumerate(self._tags):
            text = text.replace(f'<g id="tagged-{number}">', start)
        text = re.sub("<[^>]+>", _for_a_page, re.sub("<clipPath.*?</clipPath>", "", text))
        # Of two charts with one id, the browser may take what the hidden one defines.
        digest = hashlib.sha256(text.encode()).hexdigest()[:8]
        text = re.sub(r'((?:id|href)="#?m[0-9a-f]{10})"', rf'\g<1>-{digest}"', text)
        box = " ".join(map(str, (0, 0, *self._size)))
        return Markup(f'<svg viewBox="{box}" role="img" aria-label="{escape(label)}">{text}</svg>')


def line_chart(
    lines: Sequence[Line], *, x_label: str, y_label: str, log: bool, x_values: Sequence[float],
    y_values: Sequence[float], small: bool = False,
) -> Markup:
    """Draw lines over x, faint ones first."""
    chart = _Chart(270, 170, (44, 8, 8, 26)) if small else _Chart(560, 304, (74, 10, 14, 46))
    chart.set_axes(x_values, y_values, log, ticks=4 if small else 6)
    if not small:
        chart.panel.set(xlabel=x_label, ylabel=_log_label(chart, y_label))
    for line in sorted(lines, key=lambda line: not line.faint):
        if line.band:
            xs, *ends = zip(*((x, chart.inside(low), chart.inside(high)) for x, low, high in line.band), strict=True)
            band = chart.panel.fill_between(xs, ends[0], ends[1], color=colour(line.group), alpha=0.17, linewidth=0)
            chart.tag(band, line.group)
        points = [(x, chart.inside(y)) for x, y in thinned(line.points)]
        dotted = len(points) == 1 or (line.marked and len(points) <= 40)
        (drawn,) = chart.panel.plot(
            *zip(*points, strict=True), color=colour(line.group), linestyle=dashes(line.group),
            linewidth=1 if line.faint else 2, alpha=0.38 if line.faint else 1,
            marker="o" if dotted else "", markersize=4 if line.faint else 6,
        )  # fmt: skip
        chart.tag(drawn, line.group, line.name)
    return chart.svg(y_label)


def bin_chart(series: Sequence[tuple[str, int, Sequence[Step]]], *, x_label: str, y_label: str, log: bool) -> Markup:
    """Draw a value with a whisker per timestep bin, as wide as the bin; series: (name, group, bins)."""
    chart = _Chart(1140, 344, (74, 10, 14, 46))
    bins = [one for _, _, found in series for one in found]
    edges = [edge for one in bins for edge in (one.start, one.end)]
    chart.set_axes(edges, [y for one in bins for y in (one.value, one.low, one.high)], log, ticks=10)
    chart.panel.set(xlabel=x_label, ylabel=_log_label(chart, y_label))
    for place, (name, group, found) in enumerate(series, start=1):
        for one in found:
            middle = one.start + (one.end - one.start) * place / (len(series) + 1)
            level = chart.panel.hlines(one.value, one.start, one.end, color=colour(group), linewidth=2)
            level.set_linestyle(dashes(group))
            chart.tag(level, group)
            ends = [[one.value - one.low], [one.high - one.value]]
            drawn = chart.panel.errorbar([middle], [one.value], ends, fmt="o", color=colour(group), capsize=4)
            for artist in drawn.get_children():
                chart.tag(artist, group, f"{name}: {significant(one.value)}")
    return chart.svg(y_label)


def bar_chart(bars: Sequence[Bar], *, unit: str) -> Markup:
    """Draw horizontal bars from zero, one below the other, with their values written at the end."""
    names = [bar.name if len(bar.name) <= _LONGEST_NAME else f"{bar.name[: _LONGEST_NAME - 1]}…" for bar in bars]
    chart = _Chart(560, 24 * len(bars) + 52, (min(24 + 7.5 * max(map(len, names)), 210), 8, 78, 44))
    panel = chart.panel
    lengths = [max(bar.value, bar.high) for bar in bars if bar.value is not None]
    chart.set_axes([0, *lengths], [0, len(bars)], log=False, ticks=5)
    panel.set_ylim(len(bars) - 0.5, -0.5)
    panel.set_yticks(range(len(bars)), names)
    panel.grid(axis="x", visible=True)
    panel.grid(axis="y", visible=False)
    panel.set_xlabel(unit)
    beside: dict[str, Any] = {
        "xytext": (6, 0), "textcoords": "offset points", "va": "center", "color": SOFT,
        "fontsize": _FONT_SIZE,
    }  # fmt: skip
    for place, bar in enumerate(bars):
        if bar.value is None:
            panel.annotate("not logged", (0, place), **beside)
            continue
        panel.barh([place], [bar.value], height=0.6, color=colour(bar.group), alpha=0.75)
        panel.plot([bar.low, bar.high], [place, place], color="black", linewidth=1, marker="|", markersize=8)
        panel.annotate(significant(bar.value, 3), (max(bar.value, bar.high), place), **beside)
    return chart.svg(unit)


def spans_much(values: Iterable[float]) -> bool:
    """Check whether positive values need a logarithmic axis: the highest is five times the lowest."""
    found = list(values)
    return bool(found) and min(found) > 0 and max(found) >= 5 * min(found)


def thinned(points: Sequence[Point]) -> Sequence[Point]:
    """At most about MOST_POINTS of a line's points; lowest and highest of every stretch stay, so no spike is lost."""
    if len(points) <= MOST_POINTS:
        return points
    starts = [*range(0, len(points), -(-2 * len(points) // MOST_POINTS)), len(points)]
    kept = [points[0]]
    for start, end in pairwise(starts):
        part = points[start:end]
        kept += sorted({min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])})
    return [*kept, points[-1]]


def _span(values: Sequence[float], margin: float, log: bool = False) -> tuple[float, float]:
    """Ends of an axis with a margin, as a share of it, on both sides; never of no length."""
    low, high = min(values), max(values)
    if log:
        factor = (high / low) ** margin if high > low else 1.12
        return low / factor, high * factor
    room = margin * (high - low) if high > low else abs(high) * 0.05 or 1.0
    return low - room, high + room


def _log_label(chart: _Chart, label: str) -> str:
    return f"{label} (log)" if chart.panel.get_yscale() == "log" else label


def _for_a_page(found: re.Match) -> str:
    """Clean a tag of matplotlib's: a tenth of a pixel, named colours, no fonts and no unreferenced names."""
    tag = re.sub(r' id="[a-z0-9.]+_\d+"| clip-path="[^"]*"| font-family: [^;"]*;?', "", found[0])
    tag = re.sub(r'(?<=[ "])-?\d+\.\d{3,}', lambda number: f"{float(number[0]):.1f}", tag)
    return re.sub("(?<=fill: |roke: )#[0-9a-f]{6}", lambda hexadecimal: _NAMES.get(hexadecimal[0], hexadecimal[0]), tag)
