"""Style of the pictures: colours distinguishable with any colour vision, labels at the lines, a light background."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes as Panel
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from torchtitan.files.durable import replacing
from torchtitan.pictures.figure_text import show_text_as_it_is
from torchtitan.statistics.interval import Interval

# Okabe and Ito's colours without the yellow, which is too bright for lines on white.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#4b4b4b")
MARKERS = ("o", "s", "^", "D", "v", "P", "*")
SOFT, LINE = "#5b6470", "#dfe3e8"


def new_figure(
    title: str, rows: int, columns: int, size: tuple[float, float], **options
) -> tuple[Figure, list[list[Panel]]]:
    """New figure and its panels [rows][columns]."""
    layout = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08)
    figure = Figure(figsize=size, layout=layout, facecolor="white")
    panels = figure.subplots(rows, columns, squeeze=False, **options)
    figure.suptitle(title, fontsize=12)
    for panel in panels.flat:
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="both", color=LINE, linewidth=0.7)
        panel.set_axisbelow(True)
        panel.tick_params(labelsize=8, colors=SOFT)
    return figure, [list(row) for row in panels]


def save(figure: Figure, path: Path) -> Path:
    show_text_as_it_is(figure)
    with replacing(path) as unfinished:
        figure.savefig(unfinished, format="png", dpi=110)
    return path


def colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def marker(number: int) -> str:
    return MARKERS[(number // len(COLOURS)) % len(MARKERS)]


def dashes(number: int) -> str:
    return ("-", "--", ":", "-.")[number // len(COLOURS) % 4]


def error_bar(estimate: Interval | None) -> tuple[float, float]:
    """Lengths of the interval below and above the value; 0 where there is no interval."""
    if estimate is None or not estimate.bounded:
        return 0.0, 0.0
    return max(estimate.value - estimate.lower, 0.0), max(estimate.upper - estimate.value, 0.0)


def spread(places: Sequence[float], gap: float, low: float = 0.0, high: float = 1.0) -> list[float]:
    """Spread places apart until neighbours keep a gap, as little as possible, within low and high where they fit.

    Args:
        places: any order.
        gap: least distance, > 0.

    Returns:
        the new places, in the order of the old.
    """
    order = sorted(range(len(places)), key=lambda n: places[n])
    blocks: list[list[float]] = []  # wanted start of the first one, how many
    for n in order:
        blocks.append([places[n], 1])
        while len(blocks) > 1 and blocks[-2][0] + gap * blocks[-2][1] > blocks[-1][0]:
            start, count = blocks.pop()
            before, more = blocks[-1]
            blocks[-1] = [(before * more + (start - gap * more) * count) / (more + count), more + count]
    moved = [start + gap * k for start, count in blocks for k in range(int(count))]
    if moved and moved[-1] > high:
        for k in range(len(moved)):
            moved[-1 - k] = min(moved[-1 - k], high - gap * k)
    if moved and moved[0] < low:
        for k in range(len(moved)):
            moved[k] = max(moved[k], low + gap * k)
    result = [0.0] * len(places)
    for n, place in zip(order, moved, strict=True):
        result[n] = place
    return result


def label_lines(panel: Panel, ends: Sequence[tuple[float, float, str, str]], inches: float, size: float = 7.5) -> None:
    """Label lines at the right of a panel, with a thin leader from the end of each.

    Args:
        ends: (x, y, text, colour) of each line's last point; the panel's limits are final.
        inches: about the panel's height, to keep labels apart.
    """
    if not ends:
        return
    wanted = [panel.transAxes.inverted().transform(panel.transData.transform((x, y)))[1] for x, y, _, _ in ends]
    places = spread(wanted, gap=1.25 * size / 72 / inches)
    for (x, y, text, color), place in zip(ends, places, strict=True):
        panel.annotate(
            text, (x, y), xycoords="data", xytext=(1.03, place), textcoords="axes fraction", fontsize=size, color=color,
            va="center", annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": color, "linewidth": 0.6, "alpha": 0.6, "shrinkA": 0, "shrinkB": 3},
        )
