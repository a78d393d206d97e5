"""Pictures of ratios: effects of switches and their interactions; memory against throughput."""

import math
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes as Panel
from matplotlib.ticker import FixedLocator, NullLocator

from torchtitan.pictures.colours import COLOURS, SOFT
from torchtitan.pictures.number_text import counted
from torchtitan.pictures.style import PRINT_DPI, new_figure, save
from torchtitan.runs.analysis.axes import label, varying
from torchtitan.runs.analysis.cells import Cell
from torchtitan.runs.analysis.effects import EFFECT_METRICS, Effect, Interaction, Ratio, pareto
from torchtitan.runs.analysis.findings import change_label, percent
from torchtitan.runs.analysis.measures import IMAGES, MEMORY

_TICKS = (0.02, 0.05, 0.1, 0.2, 0.33, 0.5, 0.67, 0.8, 0.9, 0.95, 0.98, 1,
          1.02, 1.05, 1.1, 1.25, 1.5, 2, 3, 5, 10, 20, 50)
_LEAST = 1.03  # the axis of changes reaches at least so far on both sides of 1
_NUMBERED = 14  # most points of a Pareto front that are named
Row = tuple[str, str, dict[str, Ratio]]  # label, colour, ratios


def draw_effects(effects: Sequence[Effect], path: Path) -> Path:
    """Draw a row per switch and pairing, a panel per metric: mean change with its interval, single pairs faint behind.
    """
    rows = [
        (f"{change_label(one.switch, one.before, one.after)}\n{one.at}, {counted(len(one.pairs), 'pair')}",
         COLOURS[0] if one.at == "equal batch" else COLOURS[1], one.ratios)
        for one in effects
    ]
    metrics = [metric for metric in EFFECT_METRICS if any(metric.name in one.ratios for one in effects)]
    names = [(metric.name, metric.title.split(",")[0]) for metric in metrics]
    return _forest("Effect of each switch", rows, names, path)


def draw_interactions(found: Sequence[Interaction], path: Path) -> Path:
    """Draw a row per pair of changes: the change of the first one's effect by the second."""
    rows = [
        (f"{change_label(*one.first)}\nunder {change_label(*one.second)}, "
         f"{counted(max(ratio.count for ratio in one.ratios.values()), 'four')}", COLOURS[0], one.ratios)
        for one in found
    ]
    names = [(metric.name, metric.title.split(",")[0]) for metric in (IMAGES, MEMORY)
             if any(metric.name in one.ratios for one in found)]
    return _forest("Interaction of switches: change of one's effect by the other", rows, names, path)


def draw_pareto(cells: Sequence[Cell], path: Path) -> Path | None:
    """Draw memory against images/s, a panel per model, patch, ranks and device; the front numbered and named."""
    usable = [cell for cell in cells if IMAGES.name in cell.measures and MEMORY.name in cell.measures]
    if not usable:
        return None
    apart = ("model", "patch", "world_size", "device")
    groups: dict[tuple, list[Cell]] = {}
    for cell in usable:
        groups.setdefault(tuple(cell.axes.get(name) for name in apart), []).append(cell)
    varied = varying([cell.axes for cell in usable])
    names = [name for name in varied if name not in (*apart, "mesh", "global_batch", "local_batch")]
    columns = min(2, len(groups))
    rows = -(-len(groups) // columns)
    figure, panels = new_figure("Memory against throughput", rows, columns, (1 + 6.6 * columns, 0.8 + 3.6 * rows))
    places = [panel for row in panels for panel in row]
    for panel, members in zip(places, groups.values(), strict=False):
        _draw_front(panel, members, names)
        which = [name for name in apart if name in varied] or ["model", "patch"]
        panel.set_title(label(members[0].axes, which), fontsize=9, loc="left")
    for panel in places[len(groups):]:
        panel.set_visible(False)
    return save(figure, path, PRINT_DPI)


def _draw_front(panel: Panel, cells: list[Cell], names: list[str]) -> None:
    front = pareto(cells)
    for cell in cells:
        at = cell.known(MEMORY.name), cell.known(IMAGES.name)
        face = "none" if cell.single else SOFT
        if cell not in front:
            panel.plot(*at, marker="o", color=SOFT, markerfacecolor=face, markersize=4, alpha=0.6, linestyle="")
    xs = [cell.known(MEMORY.name) for cell in front]
    ys = [cell.known(IMAGES.name) for cell in front]
    panel.plot(xs, ys, color=COLOURS[0], linewidth=1.2, drawstyle="steps-post", zorder=3)
    for x, y, cell in zip(xs, ys, front, strict=True):
        face = "white" if cell.single else COLOURS[0]
        panel.plot([x], [y], marker="o", color=COLOURS[0], markerfacecolor=face, markersize=5.5, linestyle="", zorder=4)
    listed = front if len(front) <= _NUMBERED else front[-_NUMBERED:]
    lines = []
    for n, cell in enumerate(listed, 1):
        panel.annotate(
            str(n), (cell.known(MEMORY.name), cell.known(IMAGES.name)), xytext=(-4, 4), textcoords="offset points",
            ha="right", fontsize=7.5, color=COLOURS[0], zorder=5,
        )
        lines.append(f"{n}  {label(cell.axes, ['local_batch', *names])}")
    if len(front) > len(listed):
        lines.insert(0, f"(the {len(front) - len(listed)} of least memory have no number)")
    panel.text(1.03, 1.0, "\n".join(lines), transform=panel.transAxes, fontsize=7.5, va="top", color=COLOURS[0],
               linespacing=1.35)
    panel.set_xlabel(MEMORY.title)
    panel.set_ylabel(IMAGES.title)
    panel.set_xlim(0, 1.08 * max(cell.known(MEMORY.name) for cell in cells))
    panel.set_ylim(0, 1.12 * max(cell.known(IMAGES.name) for cell in cells))


def _forest(title: str, rows: list[Row], metrics: list[tuple[str, str]], path: Path) -> Path:
    size = (3.2 + 3.6 * len(metrics), 1.1 + 0.42 * len(rows))
    figure, panels = new_figure(title, 1, len(metrics), size, sharey=True)
    for panel, (name, text) in zip(panels[0], metrics, strict=True):
        found = [(place, color, ratios[name]) for place, (_, color, ratios) in enumerate(rows) if name in ratios]
        for place, color, ratio in found:
            _draw_ratio(panel, place, color, ratio)
        _ratio_axis(panel, [ratio for _, _, ratio in found])
        panel.set_xlabel(f"change of {text}")
        panel.grid(axis="y", visible=False)
    first = panels[0][0]
    first.set_yticks(range(len(rows)), [text for text, _, _ in rows], fontsize=8, color="black", linespacing=1.1)
    first.set_ylim(len(rows) - 0.4, -0.6)
    return save(figure, path, PRINT_DPI)


def _draw_ratio(panel: Panel, place: int, color: str, ratio: Ratio) -> None:
    if ratio.count > 1:
        panel.plot(ratio.ratios, [place] * ratio.count, marker="|", color=color, alpha=0.35, linestyle="", markersize=9)
    if ratio.bounded:
        panel.plot([ratio.lower, ratio.upper], [place, place], color=color, linewidth=2.2, solid_capstyle="butt")
    face = "white" if ratio.count == 1 else color
    panel.plot([ratio.value], [place], marker="o", color=color, markerfacecolor=face, markersize=5.5, linestyle="")
    panel.annotate(
        f"{percent(ratio.value)} %", (1.01, place), xycoords=("axes fraction", "data"), fontsize=7.5, va="center",
        color=color, annotation_clip=False,
    )


def _ratio_axis(panel: Panel, ratios: list[Ratio]) -> None:
    """Axis of changes in per cent, logarithmic; an interval far beyond the ratios themselves leaves the panel."""
    inner = [value for ratio in ratios for value in ratio.ratios] + [1.0]
    low, high = min(*inner, 1 / _LEAST), max(*inner, _LEAST)
    span = high / low
    ends = [end for ratio in ratios if ratio.bounded for end in (ratio.lower, ratio.upper)]
    low = max(min([low, *ends]), low / span) / span**0.08
    high = min(max([high, *ends]), high * span) * span**0.08
    panel.set_xscale("log")
    panel.set_xlim(low, high)
    ticks: list[float] = []
    for tick in sorted(_TICKS, key=lambda tick: (tick != 1, abs(math.log(tick)) < 0.15, abs(math.log(tick)))):
        apart = all(abs(math.log(tick / other)) > 0.16 * math.log(high / low) for other in ticks)
        if low <= tick <= high and apart:
            ticks.append(tick)
    panel.xaxis.set_major_locator(FixedLocator(ticks))
    panel.xaxis.set_minor_locator(NullLocator())
    panel.xaxis.set_major_formatter(lambda value, _: "0" if value == 1 else f"{100 * (value - 1):+.0f} %")
    panel.axvline(1, color=SOFT, linewidth=0.9)
