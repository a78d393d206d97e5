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


Runs = Mapping[tuple[str, int], MeasuredRun]


def change(run: MeasuredRun, plain: MeasuredRun, measure: str, better: Better, axis: str) -> float:
    """Change of a measure against the plain run: of its ln if lower is better, else of itself.

    Axis "images": after those that the shorter run has seen; "FLOPs": after the FLOPs that the cheaper run has spent.
    """
    costs = [run.flops, plain.flops] if axis == "FLOPs" else [1.0, 1.0]
    spent = min(cost * one.images[-1] for cost, one in zip(costs, (run, plain), strict=True))
    values = [one.at(measure, better, spent / cost) for cost, one in zip(costs, (run, plain), strict=True)]
    return values[0] - values[1]


def write(
    found: Runs, arms: Sequence[str], better: Mapping[str, Better], failures: Mapping[str, str], folder: Path
) -> str:
    """Draw the picture into the folder; return the text below the summary's title.

    Args:
        found: (arm, seed) -> its run, of those that have ended.
        arms: the plain run first.
        better: direction of each measure.
        failures: name of a run -> reason.
    """
    comparisons = (len(arms) - 1) * len(better) * len(AXES)
    text = (
        f"Changes against {arms[0]}, paired by seed, with 95 % intervals by Student's t over seeds; bold: the interval "
        f"excludes 0; bold with *: at 1 - 0.05 / {comparisons} too, for {comparisons} comparisons.\n\n"
    )
    for axis in AXES:
        text += f"## Equal {axis}\n\n" + _table(found, arms, better, axis, comparisons)
    if len({seed for _, seed in found}) > 1:
        text += draw(found, arms, better, folder / "methods.png")
    return text + "".join(f"- {name} failed: {reason}\n" for name, reason in failures.items())


def differences(found: Runs, arm: str, plain: str, measure: str, better: Better, axis: str) -> list[float]:
    """Changes of an arm, one for each seed that the plain run has too."""
    seeds = sorted(seed for name, seed in found if name == arm and (plain, seed) in found)
    return [change(found[arm, seed], found[plain, seed], measure, better, axis) for seed in seeds]


def _table(found: Runs, arms: Sequence[str], better: Mapping[str, Better], axis: str, comparisons: int) -> str:
    plain = [run for (name, _), run in found.items() if name == arms[0]]
    means = [f"{fmean(run.curves[name][-1] for run in plain):.4g}" if plain else "-" for name in better]
    rows: list[list[str]] = [[arms[0], str(len(plain)), "1", *means]]
    for arm in arms[1:]:
        seeds = sorted(seed for name, seed in found if name == arm and (arms[0], seed) in found)
        ratio = f"{fmean(found[arm, seed].flops / found[arms[0], seed].flops for seed in seeds):.3g}" if seeds else "-"
        changes = [(differences(found, arm, arms[0], name, direction, axis), direction) for name, direction in better.items()]
        rows.append([arm, str(len(seeds)), ratio, *(_text(values, direction, comparisons) for values, direction in changes)])
    arrows = {"lower": "↓", "higher": "↑"}
    return markdown_table(["method", "seeds", "FLOPs an image", *(f"{name} {arrows[better[name]]}" for name in better)], rows)


def _text(values: Sequence[float], better: Better, comparisons: int) -> str:
    if not values:
        return "-"
    found = mean_interval(values)
    unit = "%" if better == "lower" else "points"
    middle, low, high = (_per_cent(end, better) for end in (found.value, found.lower, found.upper))
    text = f"{middle:+.1f} {unit}" + (f" [{low:+.1f}, {high:+.1f}]" if found.bounded else "")
    if not found.bounded or not found.excludes(0.0):
        return text
    return Markdown(f"**{text}**" + ("\\*" if mean_interval(values, 1 - 0.05 / comparisons).excludes(0.0) else ""))


def _per_cent(value: float, better: Better) -> float:
    """Change in per cent of the plain run's value, or in points of a share."""
    return 100 * (math.expm1(min(value, 700.0)) if better == "lower" else value)


def draw(found: Runs, arms: Sequence[str], better: Mapping[str, Better], path: Path) -> str:
    """Draw the changes of every method: a panel per measure, a row per method, a point per axis."""
    figure, (panels,) = new_figure(
        f"Changes against {arms[0]}", 1, len(better), (3.2 * len(better) + 2, 0.36 * len(arms) + 1.6), sharey=True
    )
    for panel, (measure, direction) in zip(panels, better.items(), strict=True):
        panel.axvline(0, color="black", linewidth=1)
        for number, axis in enumerate(AXES):
            for place, arm in enumerate(arms[1:]):
                if values := differences(found, arm, arms[0], measure, direction, axis):
                    _point(panel, values, direction, place + 0.3 * number - 0.15, number, f"equal {axis}" if not place else None)
        panel.set_xlabel(f"{measure}, {'change in %, lower is better' if direction == 'lower' else 'points, higher is better'}")
    panels[0].set_yticks(range(len(arms) - 1), arms[1:])
    panels[0].set_ylim(len(arms) - 1.5, -0.5)
    panels[0].legend(fontsize=8)
    note(figure, f"95 % intervals over {len({seed for _, seed in found})} seeds, paired")
    return save(figure, path)


def _point(panel, values: Sequence[float], better: Better, height: float, number: int, label: str | None) -> None:
    found = mean_interval(values)
    value, lower, upper = (_per_cent(end, better) for end in (found.value, found.lower, found.upper))
    bars = [[end] for end in error_bar(Interval(value, lower, upper))]
    panel.errorbar(
        [value], [height], xerr=bars, color=colour(number), marker="os"[number], markersize=4, capsize=2,
        linestyle="none", label=label, fillstyle="none" if number else "full",
    )  # fmt: skip
