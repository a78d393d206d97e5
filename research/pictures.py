"""Parts of the studies' pictures and tables."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from torchtitan.pictures import style
from torchtitan.pictures.style import Panel
from torchtitan.statistics.interval import Interval


def save(figure: Figure, path: Path) -> str:
    """Save the picture; return a line of Markdown that shows it."""
    style.save(figure, path)
    return f"![{path.stem}]({path.name})\n\n"


def interval_text(found: Interval, form: str = ".4g") -> str:
    """Format a value with its interval, if that is bounded."""
    return f"{found.value:{form}}" + (f" [{found.lower:{form}}, {found.upper:{form}}]" if found.bounded else "")


def legend_outside(panel: Panel, title: str | None = None, entries_of: Panel | None = None) -> None:
    """Place the legend, of this panel or of another, to the right of the panel."""
    panel.legend(
        *(entries_of or panel).get_legend_handles_labels(), loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=8,
        title=title, title_fontsize=8, frameon=False,
    )  # fmt: skip


def write_cells(
    panel: Panel, values: np.ndarray, texts: Sequence[Sequence[str]], dark: Callable[[float], bool]
) -> None:
    """Write texts into the cells of a heat map of values [rows, columns], in white where a value's colour is dark."""
    for (row, column), value in np.ndenumerate(values):
        ink = "white" if dark(value) else "black"
        panel.text(column, row, texts[row][column], ha="center", va="center", fontsize=8, color=ink)
