"""Style of every chart: a light grid, names as they are."""

import io
import math
import textwrap
from pathlib import Path
from typing import Any, Literal

import numpy as np
from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes as Panel
from matplotlib.axis import Axis, XAxis
from matplotlib.figure import Figure
from matplotlib.gridspec import SubplotSpec
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter
from PIL import Image

from torchtitan.files.durable import replacing
from torchtitan.pictures.colours import COLOURS, LINE, SOFT
from torchtitan.statistics.interval import Interval

MARKERS = ("o", "s", "^", "D", "v", "P", "*")
SCREEN_DPI, PRINT_DPI = 110, 200  # of pictures to look at, and of those that go into papers
_SMALL = 15  # characters of small text in an inch
_EMBEDDED_DPI = 80  # of those within logs
_DASHES: tuple[Literal["-"], Literal["--"], Literal[":"], Literal["-."]] = ("-", "--", ":", "-.")
STYLE: dict[Any, Any] = {
    "figure.titlesize": 12, "axes.labelsize": 9, "xtick.labelsize": 8, "ytick.labelsize": 8,
    "xtick.color": SOFT, "ytick.color": SOFT, "axes.edgecolor": SOFT, "axes.spines.top": False,
    "axes.spines.right": False, "axes.axisbelow": True, "axes.grid": True, "grid.color": LINE, "grid.linewidth": 0.7,
}  # fmt: skip


def new_figure(
    title: str, rows: int = 1, columns: int = 1, size: tuple[float, float] = (9, 5.5), **options: Any
) -> tuple[Figure, np.ndarray]:
    """New figure and its panels [rows, columns]; no window is opened and no global state changed."""
    figure = new_plain_figure(title, size)
    with rc_context(STYLE):
        return figure, figure.subplots(rows, columns, squeeze=False, **options)


def new_plain_figure(title: str, size: tuple[float, float]) -> Figure:
    """New figure without panels, for `add_panel`."""
    with rc_context(STYLE):
        figure = Figure(figsize=size, layout=ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08), facecolor="white")
        figure.suptitle(title, wrap=True)
        return figure


def add_panel(figure: Figure, place: SubplotSpec) -> Panel:
    """Add a panel at a place of a grid."""
    with rc_context(STYLE):
        return figure.add_subplot(place)


def save(figure: Figure, path: Path, dpi: int = SCREEN_DPI) -> Path:
    """Write a PNG; its folder is there."""
    with replacing(path) as unfinished:
        figure.savefig(unfinished, format="png", dpi=dpi)
    return path


def as_image(figure: Figure) -> Image.Image:
    """Render the figure as an RGB picture."""
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=_EMBEDDED_DPI)
    return Image.open(content).convert("RGB")


def colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def marker(number: int) -> str:
    return MARKERS[(number // len(COLOURS)) % len(MARKERS)]


def dashes(number: int) -> Literal["-", "--", ":", "-."]:
    return _DASHES[number // len(COLOURS) % 4]


def ordered_colours(count: int) -> list:
    """Colours of an ordered series, as timestep bins: from dark to bright."""
    return [colormaps["viridis"](0.92 * place / max(count - 1, 1)) for place in range(count)]


def note(figure: Figure, text: str) -> None:
    """Add a line under the picture."""
    figure.supxlabel(folded(figure, text), fontsize=8, color=SOFT)


def folded(figure: Figure, text: str) -> str:
    """Fold small text to lines of the picture's width."""
    return "\n".join(textwrap.fill(line, int(_SMALL * figure.get_figwidth())) for line in text.splitlines())


def label_log_axis(axis: Axis) -> None:
    """Label a logarithmic axis sufficiently, even where it spans less than a power of ten, without equal labels."""
    low, high = axis.get_view_interval()
    most, parts = (4, (1, 3)) if isinstance(axis, XAxis) else (8, (1, 2, 5))  # labels side by side take more room
    wide = LogLocator(subs=parts) if high < 10 ** (most / 2) * low else LogLocator(numticks=most)
    locator = MaxNLocator(3 * most // 4) if high < 10 * low else wide
    ticks = locator.tick_values(low, high)
    axis.set_major_locator(locator)
    axis.set_major_formatter(f"{{x:.{max(3, *map(_digits, ticks))}g}}")
    axis.set_minor_formatter(NullFormatter())


def _digits(value: float) -> int:
    """Fewest significant digits that give a value back, to 1e-12."""
    return next(digits for digits in range(1, 18) if math.isclose(float(f"{value:.{digits}g}"), value, rel_tol=1e-12))


def error_bar(estimate: Interval | None) -> tuple[float, float]:
    """Lengths of the interval below and above the value; 0 where there is no interval."""
    if estimate is None or not estimate.bounded:
        return 0.0, 0.0
    return max(estimate.value - estimate.lower, 0.0), max(estimate.upper - estimate.value, 0.0)
