"""Text in matplotlib's pictures is literal: a `$` begins no formula, controls do nothing, long titles are wrapped."""

from bisect import bisect_left

from matplotlib.backends.backend_agg import RendererAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import LogFormatter, LogitFormatter, ScalarFormatter

from torchtitan.terminal import printable, shortened

_USED_WIDTH = 0.96  # of a figure, by its title and note


def show_text_as_it_is(figure: Figure) -> None:
    """Show titles, labels, legends and named ticks of a figure literally; powers of ten stay formulas."""
    numbers: set[Text] = set()
    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        ticks = list(axis.get_minor_ticks())
        if isinstance(axis.get_major_formatter(), LogFormatter | LogitFormatter | ScalarFormatter):
            ticks += axis.get_major_ticks()
        numbers |= {axis.get_offset_text(), *(label for tick in ticks for label in (tick.label1, tick.label2))}
    for text in figure.findobj(Text):
        if text not in numbers:
            text.set_parse_math(False)
            text.set_text(shortened(printable(text.get_text())))


def fit_to_width(figure: Figure, dpi: float) -> None:
    """Wrap the figure's title and note where they exceed its width: at spaces, and within a word that alone does.

    Args:
        dpi: of the file; hinted letters are not proportionally wide at another.
    """
    widest = _USED_WIDTH * figure.get_figwidth() * dpi  # pixels
    renderer = RendererAgg(1, 1, dpi)
    for text in figure.texts:
        if text.get_rotation() == 0:
            text.set_text("\n".join(_wrapped(text, line, widest, renderer) for line in text.get_text().splitlines()))


def _wrapped(text: Text, line: str, widest: float, renderer: RendererAgg) -> str:
    def exceeds(part: str) -> bool:
        text.set_text(part)
        return text.get_window_extent(renderer, renderer.dpi).width > widest

    lines = []
    while exceeds(line):
        beginnings = [line[:length] for length in range(2, len(line))]
        fitting = bisect_left(beginnings, True, key=exceeds) + 1
        end = max(line.rfind(" ", 0, fitting + 1), 0) or fitting
        lines.append(line[:end])
        line = line[end:].lstrip()
    return "\n".join([*lines, line])
