"""Picture of memory by part: what every step holds, exactly, and the rest of the measured peak."""

import textwrap
from collections.abc import Sequence
from pathlib import Path

from torchtitan.pictures.colours import LINE
from torchtitan.pictures.number_text import significant
from torchtitan.pictures.style import PRINT_DPI, colour, new_figure, note, save
from torchtitan.runs.analysis.axes import DATA, label, varying
from torchtitan.runs.analysis.cells import Cell, arms
from torchtitan.runs.analysis.drawing import divided
from torchtitan.runs.analysis.measures import MEMORY

_WIDTH = 60  # characters of a label's line
_REST = "activations and all else"
_NOTE = "All else: temporaries, gathered weights, other networks, the allocator's cache; of a process on a CPU also the program."


def draw_memory_parts(cells: Sequence[Cell], folder: Path) -> list[tuple[str, Path]]:
    """Draw the memory of every arm at its largest measured batch, a picture for each model, device and data.

    Returns:
        title and file of each.
    """
    known = [cell for cell in cells if MEMORY.name in cell.measures and cell.good_runs[0].held]
    largest = [arm[-1] for arm in arms(known).values()]
    all_axes = [cell.axes for cell in largest]
    inside = [name for axes in all_axes for name in axes if name not in ("model", "device", DATA)]
    drawn = []
    for where, ending, members in divided(largest, all_axes, inside):
        title = f"Peak memory of a process by part: {where}"
        drawn.append((title, _draw(members, title, folder / f"memory_over_parts{ending}.png")))
    return drawn


def _draw(cells: list[Cell], title: str, path: Path) -> Path:
    names = dict.fromkeys((*varying([cell.axes for cell in cells]), "local_batch"))
    labels = [label(cell.axes, [name for name in names if name not in ("mesh", "global_batch")]) for cell in cells]
    labels = [textwrap.fill(each, _WIDTH) for each in labels]
    rows = max(each.count("\n") for each in labels) + 1
    figure, ((panel,),) = new_figure(title, size=(9, 1.7 + (0.15 + 0.15 * rows) * len(cells)))
    places, ends = range(len(cells)), [0.0] * len(cells)
    parts = {name: [cell.good_runs[0].held[name] for cell in cells] for name in cells[0].good_runs[0].held}
    peaks = [cell.measures[MEMORY.name].value for cell in cells]
    parts[_REST] = [peak - sum(held) for peak, held in zip(peaks, zip(*parts.values(), strict=True), strict=True)]
    for n, (name, values) in enumerate(parts.items()):
        panel.barh(places, values, left=ends, height=0.62, color=LINE if name == _REST else colour(n), label=name)
        ends = [end + value for end, value in zip(ends, values, strict=True)]
    for place, peak in enumerate(peaks):
        panel.annotate(significant(peak, 3), (peak, place), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8)
    panel.set_yticks(places, labels)
    panel.set(xlim=(0, 1.1 * max(peaks)), ylim=(len(cells) - 0.4, -0.6), xlabel=MEMORY.title)
    panel.grid(axis="y", visible=False)
    figure.legend(loc="outside right center", fontsize=8, frameon=False)
    note(figure, _NOTE)
    return save(figure, path, PRINT_DPI)
