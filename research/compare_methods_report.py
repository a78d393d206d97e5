"""Report of methods compared: changes of every measure against the plain run at equal images and equal FLOPs."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import numpy as np

from research.pictures import save
from torchtitan.fidelity.measurement import Better
from torchtitan.pictures.markdown import Markdown, markdown_table
from torchtitan.pictures.style import colour, error_bar, new_figure, note
from torchtitan.statistics.interval import Interval, mean_interval

AXES = ("images", "FLOPs")


@dataclass(frozen=True)
class MeasuredRun:
    """Measurements of a run.

    Attributes:
        flops: of training on an image.
        images: seen at its measurements, rising.
        curves: measure -> its values there.
    """

    flops: float
    images: list[int]
    curves: dict[str, list[float]]

    @classmethod
    def of_row(cls, row: Mapping[str, str]) -> "MeasuredRun":
        return cls(float(row["flops_per_image"]), list(map(int, row["images"].split())), json.loads(row["curves"]))

    def at(self, measure: str, better: Better, images: float) -> float:
        """Value after a number of images, on a line in ln images between measurements: ln of one that is better lower."""
        values = [math.log(value) if better == "lower" else value for value in self.curves[measure]]
        return float(np.interp(math.log(images), np.log(self.images), values))


_EARLY = "†"

Runs = Mapping[tuple[str, int], MeasuredRun]  # by method and seed


def change(run: MeasuredRun, plain: MeasuredRun, measure: str, better: Better, axis: str) -> float:
    """Change of a measure against the plain run: of its ln if lower is better, else of itself.

    Axis "images": after those that the shorter run has seen; "FLOPs": after the FLOPs that the cheaper run has spent.
    """
    places = _images_at(run, plain, axis)
    return run.at(measure, better, places[0]) - plain.at(measure, better, places[1])


def _images_at(run: MeasuredRun, plain: MeasuredRun, axis: str) -> list[float]:
    costs = [(one.flops if axis == "FLOPs" else 1.0) for one in (run, plain)]
    spent = min(costs[0] * run.images[-1], costs[1] * plain.images[-1])
    return [spent / cost for cost in costs]


def write(found: Runs, methods: Sequence[str], better: Mapping[str, Better], folder: Path) -> str:
    """Draw the picture into the folder; return the text of the summary.

    Args:
        found: the runs that have ended.
        methods: the plain run first.
        better: direction of each measure.
    """
    count = (len(methods) - 1) * len(better) * len(AXES)
    text = (
        f"Changes against {methods[0]}, paired by seed, with 95 % intervals by Student's t over seeds; bold: the interval "
        f"excludes 0; bold with *: also at 1 - 0.05 / {count}, for {count} comparisons.\n\n"
    )
    for axis in AXES:
        text += f"## Equal {axis}\n\n" + _table(found, methods, better, axis, count)
    text += f"## Loss over training\n\n{_over_training(found, methods)}"
    return text + draw(found, methods, better, folder / "methods.png")


def _over_training(found: Runs, methods: Sequence[str]) -> str:
    """Table of the changes of the loss at each measurement of equal images, and of these against the last one."""
    lines = []
    for method in methods[1:]:
        pairs = [pair for pair in _paired(found, method, methods[0]) if pair[0].images == pair[1].images]
        curves = [(run.curves["loss"], plain.curves["loss"]) for run, plain in pairs]
        changes = [[math.log(a / b) for a, b in zip(*both, strict=True)] for both in curves]
        for place, images in enumerate(pairs[0][0].images if pairs else ()):
            now = change_text([each[place] for each in changes], "lower")
            lines.append([method, str(images), now, change_text([each[place] - each[-1] for each in changes], "lower")])
    return markdown_table(["method", "images", "loss", "against its change at the end"], lines)


def _paired(found: Runs, method: str, plain: str) -> list[tuple[MeasuredRun, MeasuredRun]]:
    return [(run, found[plain, seed]) for (name, seed), run in found.items() if name == method and (plain, seed) in found]


def _table(found: Runs, methods: Sequence[str], better: Mapping[str, Better], axis: str, count: int) -> str:
    plain = [run for (name, _), run in found.items() if name == methods[0]]
    means = [f"{fmean(run.curves[name][-1] for run in plain):.4g}" if plain else "-" for name in better]
    rows = [[methods[0], str(len(plain)), "1", *means]]
    for method in methods[1:]:
        if pairs := _paired(found, method, methods[0]):
            changes = [([change(*pair, name, which, axis) for pair in pairs], which) for name, which in better.items()]
            ratio = fmean(run.flops / of.flops for run, of in pairs)
            # `MeasuredRun.at` takes the first measurement for what lies before it.
            starts = [zip(_images_at(*pair, axis), pair, strict=True) for pair in pairs]
            early = any(images < one.images[0] * (1 - 1e-9) for start in starts for images, one in start)
            texts = [change_text(*found, count) for found in changes]
            rows.append([method, str(len(pairs)), f"{ratio:.3g}{_EARLY * early}", *texts])
        else:
            rows.append([method, "0", "-", *("-" for _ in better)])
    arrows = {"lower": "↓", "higher": "↑"}
    heads = ["method", "seeds", "FLOPs", *(f"{name} {arrows[which]}" for name, which in better.items())]
    note = f"{_EARLY} equal {axis} lie before a first measurement, which is taken instead (more --checkpoints).\n\n"
    return markdown_table(heads, rows) + note * any(_EARLY in row[2] for row in rows)


def change_text(changes: Sequence[float], better: Better, count: int = 1) -> str:
    """Mean change with its interval, bold where that excludes 0, with a star where it does so for `count` comparisons too."""
    found, shown = mean_interval(changes), _in_per_cent(changes, better)
    text = f"{shown.value:+.1f} {'%' if better == 'lower' else 'points'}"
    if not found.bounded:
        return text
    text += f" [{shown.lower:+.1f}, {shown.upper:+.1f}]"
    if not found.excludes(0.0):
        return text
    return Markdown(f"**{text}**" + ("\\*" if count > 1 and mean_interval(changes, 1 - 0.05 / count).excludes(0.0) else ""))


def _in_per_cent(changes: Sequence[float], better: Better) -> Interval:
    """Mean change in per cent of the plain run's value, or in points of a share."""
    found = mean_interval(changes)
    ends = found.value, found.lower, found.upper
    value, lower, upper = (100 * (math.expm1(min(end, 700.0)) if better == "lower" else end) for end in ends)
    return Interval(value, lower, upper)


def draw(found: Runs, methods: Sequence[str], better: Mapping[str, Better], path: Path) -> str:
    """Draw the changes: a panel per measure, a row per method, a point per axis."""
    plain, size = methods[0], (3.2 * len(better) + 2, 0.36 * len(methods) + 1.6)
    figure, (panels,) = new_figure(f"Changes against {plain}", 1, len(better), size, sharey=True)
    for panel, (measure, which) in zip(panels, better.items(), strict=True):
        panel.axvline(0, color="black", linewidth=1)
        for number, axis in enumerate(AXES):
            shown = {
                place: _in_per_cent([change(*pair, measure, which, axis) for pair in pairs], which)
                for place, method in enumerate(methods[1:]) if (pairs := _paired(found, method, plain))
            }  # fmt: skip
            panel.errorbar(
                [value.value for value in shown.values()], [place + 0.3 * number - 0.15 for place in shown],
                xerr=np.array([error_bar(value) for value in shown.values()]).reshape(-1, 2).T, color=colour(number),
                marker="os"[number], markersize=4, capsize=2, linestyle="none", label=f"equal {axis}",
            )  # fmt: skip
        panel.set_xlabel(f"{measure}: " + ("change in %, lower is better" if which == "lower" else "points, higher is better"))
    panels[0].set_yticks(range(len(methods) - 1), methods[1:])
    panels[0].set_ylim(len(methods) - 1.5, -0.5)
    panels[0].legend(fontsize=8)
    note(figure, "95 % intervals over seeds, paired")
    return save(figure, path)
