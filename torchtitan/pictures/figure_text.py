"""Text in matplotlib's pictures is literal: a `$` begins no formula, controls do nothing, endless names are cut."""

from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import LogFormatter, LogitFormatter, ScalarFormatter

from torchtitan.terminal import printable, shortened


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
