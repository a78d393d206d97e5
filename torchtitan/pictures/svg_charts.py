"""Charts as inline SVG: lines with bands, steps over bins, bars with whiskers. Colours come from the page's styles."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from torchtitan.terminal import printable

Point = tuple[float, float]

MOST_POINTS = 400  # drawn of one line
_COLOURS = 8


class Markup(str):
    """Text that is HTML already; any other string is escaped where it is put in."""


def element(tag: str, *children: str | None, **attributes: object) -> Markup:
    """One element; `class_` is the attribute class, `_` in other names is `-`, None leaves out."""
    written = ""
    for key, value in attributes.items():
        name = key.rstrip("_").replace("_", "-") if key != "viewBox" else key
        if value is True:
            written += f" {name}"
        elif value is not None and value is not False:
            written += f' {name}="{escape(printable(str(value)))}"'
    if tag in ("img", "input", "meta"):
        return Markup(f"<{tag}{written}>")
    return Markup(f"<{tag}{written}>{joined(children)}</{tag}>")


def joined(parts: Iterable[str | None]) -> Markup:
    given = (part for part in parts if part is not None)
    return Markup("".join(part if isinstance(part, Markup) else escape(printable(part)) for part in given))


def group_class(number: int) -> str:
    """CSS classes of the colour and, from the ninth on, the dashes of a run or group."""
    return f"g g{number} c{number % _COLOURS}" + (f" d{min(number // _COLOURS, 3)}" if number >= _COLOURS else "")


@dataclass(frozen=True)
class Line:
    """A line of a chart.

    Attributes:
        points: (x, y), x rising.
        group: number that gives the colour.
        name: shown on hover.
        faint: drawn thin, behind the others.
        band: (x, low, high) around it.
        marked: with a dot on every point.
    """

    points: Sequence[Point]
    group: int
    name: str
    faint: bool = False
    band: Sequence[tuple[float, float, float]] = ()
    marked: bool = False


@dataclass(frozen=True)
class Bar:
    """A bar with a whisker over the spread of what it stands for; `value` None is shown as missing."""

    name: str
    group: int
    value: float | None
    low: float = 0.0
    high: float = 0.0


class Axis:
    """Values to pixels, linear or logarithmic."""

    def __init__(self, values: Sequence[float], start: float, end: float, log: bool = False, pad: float = 0.05) -> None:
        low, high = min(values), max(values)
        self.log = log and low > 0
        low, high = self._to(low), self._to(high)
        margin = pad * (high - low) or (abs(high) * 0.05 or 1.0) * (pad > 0) or 0.5
        self._low, self._high = low - margin * (pad > 0 or high == low), high + margin * (pad > 0 or high == low)
        self._start, self._end = start, end

    def __call__(self, value: float) -> float:
        """Pixel of a value; what lies outside is moved to the edge."""
        share = (self._to(value) - self._low) / (self._high - self._low)
        return round(self._start + min(max(share, 0.0), 1.0) * (self._end - self._start), 1)

    def ticks(self, most: int) -> list[tuple[float, str]]:
        """About `most` round values and how they are written."""
        if self.log and self._high - self._low > 1.1:
            per_decade = (1, 2, 5) if self._high - self._low < 2.2 else (1,)
            every = max(1, math.ceil((self._high - self._low) / most)) if per_decade == (1,) else 1
            exponents = range(math.floor(self._low), math.ceil(self._high) + 1)
            found = [m * 10.0**e for e in exponents for m in per_decade if e % every == 0]
            return [(v, short(v)) for v in found if self._low <= math.log10(v) <= self._high]
        low, high = (10**self._low, 10**self._high) if self.log else (self._low, self._high)
        step = _round_step((high - low) / most)
        values = [i * step for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]
        largest = max(map(abs, values), default=0)
        for factor, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
            if largest >= 10 * factor:  # one unit for the whole axis
                return [(v, f"{v / factor:.4g}{letter}" if v else "0") for v in values]
        if largest and largest < 1e-3:
            return [(v, short(v)) for v in values]
        decimals = max(0, -math.floor(math.log10(step) + 1e-9))
        return [(v, f"{v:.{decimals}f}") for v in values]

    def _to(self, value: float) -> float:
        return math.log10(max(value, 1e-300)) if self.log else value


def line_chart(
    lines: Sequence[Line], *, x_label: str, y_label: str, log: bool, x_values: Sequence[float],
    y_values: Sequence[float], width: int = 560, height: int = 300, small: bool = False,
) -> Markup:
    """Draw lines over x.

    Args:
        lines: in any order; faint ones are drawn first.
        x_values, y_values: what the axes span; lines that leave the span are moved to its edge.
    """
    left, top, right, bottom = (40, 8, 8, 26) if small else (68, 10, 14, 42)
    x_axis = Axis(x_values, left, width - right, pad=0)
    y_axis = Axis(y_values, height - bottom, top, log)
    drawn = [_frame(x_axis, y_axis, x_label, y_label, width, height, left, top, right, bottom, small)]
    for line in sorted(lines, key=lambda line: not line.faint):
        drawn.append(_line(line, x_axis, y_axis))
    return _svg(width, height, drawn, y_label)


def bin_chart(
    series: Sequence[tuple[str, int, Sequence[tuple[float, float, float, tuple[float, float] | None]]]],
    *, x_label: str, y_label: str, log: bool, width: int = 1140, height: int = 340,
) -> Markup:
    """Draw one value per bin, as a bar as wide as the bin, with a whisker.

    Args:
        series: (name, group, bins), a bin being (left edge, right edge, value, ends of the whisker or None).
    """
    left, top, right, bottom = 68, 10, 14, 42
    bins = [one for _, _, found in series for one in found]
    x_axis = Axis([edge for one in bins for edge in one[:2]], left, width - right, pad=0)
    y_axis = Axis([y for one in bins for y in (one[2], *(one[3] or ()))], height - bottom, top, log)
    drawn = [_frame(x_axis, y_axis, x_label, y_label, width, height, left, top, right, bottom, False)]
    for place, (name, group, found) in enumerate(series):
        parts = []
        for start, end, value, whisker in found:
            x0, x1, y = x_axis(start), x_axis(end), y_axis(value)
            middle = round(x0 + (x1 - x0) * (place + 1) / (len(series) + 1), 1)
            parts.append(element("path", d=f"M{x0} {y}H{x1}", class_="line"))
            if whisker:
                parts.append(_whisker(middle, y_axis(whisker[0]), y_axis(whisker[1])))
            parts.append(element("circle", element("title", f"{name}: {significant(value)}"), cx=middle, cy=y, r=3.2))
        drawn.append(element("g", *parts, class_=group_class(group)))
    return _svg(width, height, drawn, y_label)


def bar_chart(bars: Sequence[Bar], *, unit: str, width: int = 560) -> Markup:
    """Draw horizontal bars from zero, one below the other, with their values written at the end."""
    longest = max(len(bar.name) for bar in bars)
    left, right, row, bottom = min(24 + 7 * longest, 200), 78, 24, 40
    height = row * len(bars) + bottom + 8
    present = [max(bar.value, bar.high) for bar in bars if bar.value is not None]
    axis = Axis([0, max(present, default=1) * 1.02 or 1], left, width - right, pad=0)
    drawn = []
    for value, text in axis.ticks(5):
        x = axis(value)
        drawn.append(element("path", d=f"M{x} 6V{height - bottom + 4}", class_="grid"))
        drawn.append(element("text", text, x=x, y=height - bottom + 18, text_anchor="middle"))
    centre = (left + width - right) / 2
    drawn.append(element("text", unit, x=centre, y=height - 5, text_anchor="middle", class_="label"))
    for place, bar in enumerate(bars):
        middle = 6 + row * place + row / 2
        letters = 26
        name = bar.name if len(bar.name) <= letters else bar.name[: letters - 1] + "…"
        parts = [element("text", name, x=left - 8, y=middle + 4, text_anchor="end", class_="name")]
        if bar.value is None:
            parts.append(element("text", "not logged", x=left + 6, y=middle + 4, class_="missing"))
        else:
            length = round(axis(bar.value) - left, 1)
            parts.append(element("rect", x=left, y=middle - 7, width=max(length, 0.5), height=14, class_="bar"))
            low, high = axis(bar.low), axis(bar.high)
            path = f"M{low} {middle}H{high}M{low} {middle - 4}v8M{high} {middle - 4}v8"
            parts.append(element("path", d=path, class_="spread"))
            parts.append(element("text", significant(bar.value, 3), x=max(axis(bar.value), high) + 6, y=middle + 4))
        drawn.append(element("g", *parts, class_=group_class(bar.group)))
    return _svg(width, height, drawn, unit)


def spans_much(values: Iterable[float]) -> bool:
    """Whether positive values are better seen on a logarithmic axis: the highest is five times the lowest."""
    found = list(values)
    return bool(found) and min(found) > 0 and max(found) >= 5 * min(found)


def short(value: float) -> str:
    """A number on an axis: 20k, 1.5M, 0.02, 1e-4."""
    size = abs(value)
    for factor, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= factor * (10 if letter == "k" else 1):
            return f"{value / factor:.4g}{letter}"
    text = f"{value:.4g}"
    mantissa, exponent, power = text.partition("e")
    return f"{mantissa}e{int(power)}" if exponent else text


def significant(value: float, digits: int = 4) -> str:
    """A number with so many significant digits, whole ones with thousands separated."""
    if value == 0:
        return "0"
    size = math.floor(math.log10(abs(value)))
    if size >= 15 or size < -4:
        return short(float(f"{value:.{digits}g}"))
    return f"{round(value, digits - 1 - size):,.{max(0, digits - 1 - size)}f}"


def thinned(points: Sequence[Point]) -> Sequence[Point]:
    """At most about MOST_POINTS of a line's points; lowest and highest of every stretch stay, so no spike is lost."""
    if len(points) <= MOST_POINTS:
        return points
    stretch = math.ceil(2 * len(points) / MOST_POINTS)
    kept = [points[0]]
    for start in range(0, len(points), stretch):
        part = points[start : start + stretch]
        kept += sorted({min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])})
    return [*kept, points[-1]]


def _round_step(rough: float) -> float:
    rough = max(rough, 1e-300)  # the axis of values that are all but 0
    power = 10.0 ** math.floor(math.log10(rough))
    return next(m * power for m in (1, 2, 5, 10.0001) if m * power >= rough * 0.999)


def _frame(
    x_axis: Axis, y_axis: Axis, x_label: str, y_label: str,
    width: int, height: int, left: int, top: int, right: int, bottom: int, small: bool,
) -> Markup:
    parts = []
    for value, text in y_axis.ticks(4 if small else 6):
        y = y_axis(value)
        parts.append(element("path", d=f"M{left} {y}H{width - right}", class_="grid"))
        parts.append(element("text", text, x=left - 6, y=y + 4, text_anchor="end"))
    for value, text in x_axis.ticks(3 if small else 6):
        parts.append(element("text", text, x=x_axis(value), y=height - bottom + 17, text_anchor="middle"))
        parts.append(element("path", d=f"M{x_axis(value)} {height - bottom}v4", class_="axis"))
    parts.append(element("path", d=f"M{left} {top}V{height - bottom}H{width - right}", class_="axis"))
    if not small:
        middle = (top + height - bottom) / 2
        label = y_label + (" (log)" if y_axis.log else "")
        parts.append(element("text", x_label, x=(left + width - right) / 2, y=height - 6, text_anchor="middle",
                             class_="label"))
        parts.append(element("text", label, transform=f"translate(11 {middle}) rotate(-90)", text_anchor="middle",
                             class_="label"))
    return joined(parts)


def _line(line: Line, x_axis: Axis, y_axis: Axis) -> Markup:
    parts = []
    if line.band:
        upper = " ".join(f"{x_axis(x)},{y_axis(high)}" for x, _, high in line.band)
        lower = " ".join(f"{x_axis(x)},{y_axis(low)}" for x, low, _ in reversed(line.band))
        parts.append(element("polygon", points=f"{upper} {lower}", class_="band"))
    points = [(x_axis(x), y_axis(y)) for x, y in thinned(line.points)]
    path = " ".join(f"{x},{y}" for x, y in points)
    style = "line faint" if line.faint else "line"
    parts.append(element("polyline", element("title", line.name), points=path, class_=style))
    if len(points) == 1 or (line.marked and len(points) <= 40):
        radius = 2 if line.faint else 3
        parts += [element("circle", element("title", line.name), cx=x, cy=y, r=radius) for x, y in points]
    return element("g", *parts, class_=group_class(line.group) + (" faint" if line.faint else ""))


def _whisker(x: float, y0: float, y1: float) -> Markup:
    return element("path", d=f"M{x} {y0}V{y1}M{x - 4} {y0}h8M{x - 4} {y1}h8", class_="whisker")


def _svg(width: int, height: int, parts: Iterable[str], title: str) -> Markup:
    return element("svg", *parts, viewBox=f"0 0 {width} {height}", role="img", aria_label=title)
