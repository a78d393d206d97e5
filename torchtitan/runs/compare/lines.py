"""Lines of a chart from the runs of a group."""

from collections.abc import Callable, Sequence
from typing import Any

from torchtitan.pictures.page_charts import Line
from torchtitan.runs.record import RunGroup, RunRecord, Series, align

_RATES = ("throughput", "time_metrics", "mfu", "memory")  # beginnings of tags of positive values, averaged as logarithms
Tag = str | Callable[[RunRecord], str | None]


def series_of(run: RunRecord, tag: Tag) -> Series:
    name = tag(run) if callable(tag) else tag
    return run.series(name) if name else Series()


def held_out(run: RunRecord, track: str) -> Series:
    return series_of(run, held_out_tag(track))


def held_out_tag(track: str) -> Tag:
    return lambda run: run.held_out_tags().get(track)


def group_lines(
    number: int, group: RunGroup, tag: Tag, smoothing: float, marked: bool,
    over_images: bool, faint_raw: bool,
) -> list[Line]:
    """Lines of a group over steps or images: of one run its curve, of several their mean and its band."""
    runs = [run for run in group.runs if run.images_per_step or not over_images]
    raw = [(run, one) for run in runs if (one := series_of(run, tag))]
    if not raw:
        return []

    def placed(run: RunRecord, series: Series) -> Series:
        return Series(tuple(map(run.images_at, series.steps)), series.values) if over_images else series

    def line(series: Series, name: str, **style: Any) -> Line:
        points = [(float(place), value) for place, value in zip(series.steps, series.values, strict=True)]
        return Line(points, number, name, **style)

    if len(raw) == 1:
        run, series = raw[0]
        lines = [line(placed(run, series), f"{run.name}, as logged", faint=True)] if smoothing and faint_raw else []
        return [*lines, line(placed(run, series.smoothed(smoothing)), run.name, marked=marked)]
    smooth = [placed(run, series.smoothed(smoothing)) for run, series in raw]
    lines = [line(series, run.name, faint=True, marked=marked) for (run, _), series in zip(raw, smooth, strict=True)]
    mean = align(smooth, rates=isinstance(tag, str) and tag.startswith(_RATES))
    if mean:
        band = [(float(place), one.lower, one.upper) for place, one in mean]
        points = [(float(place), one.value) for place, one in mean]
        lines.append(Line(points, number, f"{group.name}, mean", band=band, marked=marked))
    return lines


def reach(values: Sequence[float], lines: Sequence[Line], log: bool) -> list[float]:
    """Range of the vertical axis: all values, and the part of the bands that does not flatten the lines."""
    low, high = min(values), max(values)
    ends = [y for line in lines for _, *band in line.band for y in band] + [low, high]
    room = 0.5 * (high - low)
    least, most = (low / (high / low) ** 0.5, high * (high / low) ** 0.5) if log else (low - room, high + room)
    return [max(min(ends), least), min(max(ends), most)]


def cost(run: RunRecord, tag: str) -> float | None:
    """Cost of a run, as its table and its bar show it: memory's highest logged value, else the median of the tail."""
    series = run.speeds(tag)
    return max(series.values, default=None) if tag.startswith("memory/") else series.tail_median()
