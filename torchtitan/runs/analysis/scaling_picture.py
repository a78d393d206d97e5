"""Picture of scaling: images/s and efficiency over the number of ranks, a column for each kind of arm."""

import math
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes as Panel
from matplotlib.ticker import FixedLocator, LogLocator, MaxNLocator, NullLocator

from torchtitan.pictures.colours import SOFT
from torchtitan.pictures.style import PRINT_DPI, colour, error_bar, marker, new_figure, save
from torchtitan.runs.analysis.axes import label, values_in_order, varying
from torchtitan.runs.analysis.effects import ScalingCurve
from torchtitan.runs.analysis.measures import IMAGES

_BATCH = {"weak": "local_batch", "strong": "global_batch"}  # equal along a curve
_MOST_CURVES = 6  # in a panel
_COLUMNS = 4
_ALONE = ("kind", "mesh", "world_size", "local_batch", "global_batch")  # of points or rows, not of curves
_INNER = ("compile", "ac", "layout", "dtype")  # distinguished within a panel, the first ones first


def draw_scaling(curves: Sequence[ScalingCurve], path: Path) -> Path:
    """Draw a pair of rows per kind of scaling: images/s with its ideal, and below it efficiency.

    Curves of one panel differ in at most six ways, with the same colours in all panels; what else differs has columns.
    """
    inner, outer, rows = curves_in_panels(curves)
    styles = sorted({_key(curve, inner) for curve in curves}, key=lambda key: _place(curves, inner, key))
    columns = max(len(members) for _, members in rows)
    size = (2.6 + 3.3 * columns, 0.7 + 4.9 * len(rows))
    figure, panels = new_figure("Scaling over ranks (dotted: ideal)", 2 * len(rows), columns, size, sharey="row")
    for number, (kind, members) in enumerate(rows):
        pair = panels[2 * number : 2 * number + 2]
        for column in range(columns):
            if column >= len(members):
                pair[0][column].set_visible(False)
                pair[1][column].set_visible(False)
                continue
            of_panel = members[column]
            for curve in of_panel:
                _draw(pair[0][column], pair[1][column], curve, styles.index(_key(curve, inner)))
            pair[0][column].set_title(f"{kind}: {label(of_panel[0].axes, [*outer, _BATCH[kind]])}", fontsize=9, loc="left")
            for panel in (pair[0][column], pair[1][column]):
                _rank_axis(panel, of_panel)
        _speed_axis(pair[0][0])
        _efficiency_axis(pair[1][0], [curve for each in members for curve in each])
    for n, key in enumerate(styles):
        text = label(dict(zip(inner, key, strict=True)), inner) or "all"
        panels[0][0].plot([], [], color=colour(n), marker=marker(n), linestyle=_dashes(n), label=text)
    figure.legend(loc="outside right upper", fontsize=8.5, frameon=False)
    return save(figure, path, PRINT_DPI)


Rows = list[tuple[str, list[list[ScalingCurve]]]]


def curves_in_panels(curves: Sequence[ScalingCurve]) -> tuple[list[str], list[str], Rows]:
    """Spread curves over panels.

    Returns:
        axes that differ within a panel, axes that differ between panels, and rows of panels: kind of scaling and the curves
        of each panel.
    """
    names = [name for name in varying([curve.axes for curve in curves]) if name not in _ALONE]
    inner = _inner(curves, names)
    outer = [name for name in names if name not in inner]
    rows: Rows = []
    for kind in dict.fromkeys(curve.kind for curve in curves):
        groups: dict[tuple, list[ScalingCurve]] = {}
        for curve in (curve for curve in curves if curve.kind == kind):
            groups.setdefault(_key(curve, [*outer, _BATCH[kind]]), []).append(curve)
        members = list(groups.values())
        rows += [(kind, members[start : start + _COLUMNS]) for start in range(0, len(members), _COLUMNS)]
    return inner, outer, rows


def _inner(curves: Sequence[ScalingCurve], names: Sequence[str]) -> list[str]:
    """Axes distinguished within a panel: as many as make no more than `_MOST_CURVES` curves."""
    chosen: list[str] = []
    for name in (*(name for name in _INNER if name in names), *(name for name in names if name not in _INNER)):
        if len({_key(curve, [*chosen, name]) for curve in curves}) <= _MOST_CURVES:
            chosen.append(name)
    return chosen


def _key(curve: ScalingCurve, names: Sequence[str]) -> tuple:
    return tuple(curve.axes.get(name) for name in names)


def _place(curves: Sequence[ScalingCurve], names: Sequence[str], key: tuple) -> list[int]:
    orders = [values_in_order(name, {curve.axes.get(name) for curve in curves}) for name in names]
    return [order.index(value) if value in order else -1 for order, value in zip(orders, key, strict=True)]


def _draw(speed: Panel, efficiency: Panel, curve: ScalingCurve, n: int) -> None:
    ranks = [point.ranks for point in curve.points]
    images = [point.cell.measures[IMAGES.name] for point in curve.points]
    shares = [point.efficiency.scaled(100) for point in curve.points]
    speed.plot(ranks, [images[0].value * r / ranks[0] for r in ranks], color=SOFT, linewidth=0.7, linestyle=":")
    for panel, estimates in ((speed, images), (efficiency, shares)):
        below, above = zip(*map(error_bar, estimates), strict=True)
        values = [one.value for one in estimates]
        panel.errorbar(ranks, values, yerr=[below, above], color=colour(n), linestyle=_dashes(n), linewidth=1.5, capsize=2)
        for rank, value, point in zip(ranks, values, curve.points, strict=True):
            face = "white" if point.cell.single else colour(n)
            panel.plot([rank], [value], marker=marker(n), color=colour(n), markerfacecolor=face, markersize=4.5, linestyle="")


def _dashes(n: int) -> str | tuple:
    return "-" if n % 2 == 0 else (0, (4, 2))


def _rank_axis(panel: Panel, curves: Sequence[ScalingCurve]) -> None:
    panel.set_xscale("log", base=2)
    panel.xaxis.set_major_locator(FixedLocator(sorted({point.ranks for curve in curves for point in curve.points})))
    panel.xaxis.set_minor_locator(NullLocator())
    panel.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    panel.set_xlabel("ranks")


def _speed_axis(panel: Panel) -> None:
    panel.set_ylabel("images/s")
    panel.set_yscale("log")
    panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panel.yaxis.set_minor_locator(NullLocator())
    panel.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")


def _efficiency_axis(panel: Panel, curves: Sequence[ScalingCurve]) -> None:
    """Axis from the tens below the least efficiency: differences are of a few per cent."""
    values = [100 * point.efficiency.value for curve in curves for point in curve.points]
    low = 10 * math.floor((min(values) - 4) / 10)
    panel.set_ylabel("efficiency, %")
    panel.set_ylim(max(low, 0), 10 * math.ceil(max(*values, 100.0) / 10) + 4)
    panel.yaxis.set_major_locator(MaxNLocator(6))
