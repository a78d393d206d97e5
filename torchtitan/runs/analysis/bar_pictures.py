"""Bars of an effect: one for each named configuration in which both values of a switch ran."""

import re
from collections.abc import Sequence
from pathlib import Path

from torchtitan.pictures.colours import COLOURS, SOFT
from torchtitan.pictures.style import PRINT_DPI, error_bar, new_figure, save
from torchtitan.runs.analysis.axes import label, varying
from torchtitan.runs.analysis.cells import Cell
from torchtitan.runs.analysis.effects import EFFECT_METRICS, Effect, Ratio, geometric_mean
from torchtitan.runs.analysis.findings import change_label, percent
from torchtitan.statistics.interval import Interval

_MOST_BARS = 60  # in a picture
_LEAST = 3.0  # per cent that an axis reaches at least on both sides
NAME = "effect_bars_{}.png"


def draw_bars(effects: Sequence[Effect], folder: Path) -> list[tuple[str, Path]]:
    """Draw a picture for each effect at best batch: per configuration its change of images/s, MFU and memory in per cent.

    Returns:
        title and file of each.
    """
    drawn = []
    for effect in effects:
        if effect.at != "best batch" or not effect.ratios:
            continue
        change = change_label(effect.switch, effect.before, effect.after)
        slug = re.sub(r"[^A-Za-z0-9.=-]+", "-", f"{effect.switch}-{effect.before}-{effect.after}").strip("-")[:80]
        title = f"{change}, at best batch, by configuration"
        drawn.append((title, _draw(effect, title, folder / NAME.format(slug))))
    return drawn


def _draw(effect: Effect, title: str, path: Path) -> Path:
    metrics = [metric for metric in EFFECT_METRICS if metric.name in effect.ratios]
    names = _named_by(effect)
    pairs = sorted(effect.pairs, key=lambda pair: label(pair[0].axes, names))[:_MOST_BARS]
    if len(pairs) < len(effect.pairs):
        title += f" (the first {len(pairs)} of {len(effect.pairs)})"
    size = (3.4 + 3.4 * len(metrics), 1.2 + 0.36 * len(pairs))
    figure, panels = new_figure(title, 1, len(metrics), size, sharey=True)
    for panel, metric in zip(panels[0], metrics, strict=True):
        largest = _LEAST
        for place, (before, after) in enumerate(pairs):
            if metric.name not in before.measures or metric.name not in after.measures:
                continue
            ratio = geometric_mean([((after,), (before,))], metric.name)
            shown = _in_per_cent(ratio)
            below, above = error_bar(shown)
            largest = max(largest, abs(shown.value))
            color = COLOURS[0] if ratio.value >= 1 else COLOURS[1]
            panel.barh([place], [shown.value], height=0.62, color=color, alpha=0.85)
            panel.errorbar([shown.value], [place], xerr=[[below], [above]], color="black", linewidth=0.9, capsize=2)
            panel.annotate(
                f"{percent(ratio.value)} %", (1.01, place), xycoords=("axes fraction", "data"), fontsize=7.5, va="center",
                color=color, annotation_clip=False,
            )
        low, high = panel.get_xlim()  # a wide interval leaves the panel
        panel.set_xlim(max(min(low, -_LEAST), -1.6 * largest), min(max(high, _LEAST), 1.6 * largest))
        panel.axvline(0, color=SOFT, linewidth=0.9)
        panel.set_xlabel(f"change of {metric.title.split(',')[0]}, %")
        panel.grid(axis="y", visible=False)
    texts = [f"{label(before.axes, names) or 'all'}{_batches(before, after)}" for before, after in pairs]
    panels[0][0].set_yticks(range(len(pairs)), texts, fontsize=8, color="black")
    panels[0][0].set_ylim(len(pairs) - 0.4, -0.6)
    return save(figure, path, PRINT_DPI)


def _named_by(effect: Effect) -> list[str]:
    """Axes that name a configuration: those that differ between the pairs."""
    own = {effect.switch, "mesh", "local_batch", "global_batch"}
    return [name for name in varying([before.axes for before, _ in effect.pairs]) if name not in own]


def _batches(before: Cell, after: Cell) -> str:
    first, second = before.axes.get("local_batch"), after.axes.get("local_batch")
    return f", batch {first}" if first == second else f", batch {first} → {second}"


def _in_per_cent(ratio: Ratio) -> Interval:
    return Interval(100 * (ratio.value - 1), 100 * (ratio.lower - 1), 100 * (ratio.upper - 1), ratio.count)
