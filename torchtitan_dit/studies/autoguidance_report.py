"""Summary and picture of the study of autoguidance."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchtitan.experiments.cells import Row
from torchtitan.pictures.colours import COLOURS
from torchtitan.pictures.markdown import markdown_table
from torchtitan.pictures.style import new_figure, save
from torchtitan.statistics.interval import Interval, mean_interval, paired_difference
from torchtitan_dit.studies.fractal_mixture import FractalMixture
from torchtitan_dit.studies.frame import number

NAMES = {
    "real": "the data's own points", "none": "no guidance", "null": "null condition (classifier-free)",
    "past": "the run's past (autoguidance)",
}  # fmt: skip
PICTURE = "samples.png"
_HALF_WIDTH, _PIXELS = 1.25, 240  # of a panel: in the data's units, and of its density along a side


def seed_of(cell: Mapping[str, Any]) -> int:
    """Seed of a cell's or row's network."""
    return int(cell["model"].removeprefix("seed-"))


def summary(rows: Sequence[Row]) -> str:
    """Table of the mean over seeds of each method, with intervals, and paired differences to the plain network."""
    by_method: dict[tuple[str, float], list[Row]] = {}
    for row in rows:
        if row["status"] == "ok":
            by_method.setdefault((row["reference"], number(row, "scale")), []).append(row)
    plain = by_method.get(("none", 1.0), [])
    table = []
    for (reference, scale), of_method in by_method.items():
        cells = [_shown(mean_interval([number(row, name) for row in of_method])) for name in ("outside", "coverage")]
        if reference in ("null", "past"):
            cells += [
                _shown(paired_difference(_by_seed(of_method, name), _by_seed(plain, name)), signed=True)
                for name in ("outside", "coverage")
            ]
        table.append([NAMES[reference], f"{scale:g}", *cells, *[""] * (4 - len(cells))])
    header = ["reference", "scale", "outside, %", "coverage, %", "outside, against no guidance", "coverage, against no guidance"]
    return (
        "Means over seeds with 95 % intervals; differences are paired by seed. Outside: share of the samples where the"
        " density of their class is below that of all but 0.1 % of the data. Coverage: overlap of the shares of samples and of"
        " data on each branch; of the data's own points it is below 100 % because they are finitely many.\n\n"
        + markdown_table(header, table)
    )


def draw_picture(
    mixtures: Sequence[FractalMixture], panels: Sequence[tuple[str, Tensor, float]], path: Path, shown_class: int = 0
) -> None:
    """Draw samples of one class over the density of its data, a panel per method.

    Args:
        mixtures: of the classes.
        panels: name, points [classes, N, 2] and share outside of each method.
        path: of the PNG.
        shown_class: the class in colour; the data of the others are grey.
    """
    title = "Samples of one class over the density of its data; grey: the other class"
    figure, axes = new_figure(title, columns=len(panels), size=(3.6 * len(panels), 4.4), sharex=True, sharey=True)
    side = torch.linspace(-_HALF_WIDTH, _HALF_WIDTH, _PIXELS, dtype=torch.float64)
    grid = torch.cartesian_prod(side, side)
    extent = (-_HALF_WIDTH, _HALF_WIDTH, -_HALF_WIDTH, _HALF_WIDTH)
    densities = [mixture.log_density(grid, 0.008).reshape(_PIXELS, _PIXELS).T.numpy() for mixture in mixtures]
    for axis, (name, points, outside) in zip(axes[0], panels, strict=True):
        for number_of_class, density in enumerate(densities):
            colour = "Oranges" if number_of_class == shown_class else "Greys"
            levels = np.ma.masked_less(density, density.max() - 7)
            axis.imshow(levels, extent=extent, origin="lower", cmap=colour, alpha=0.55, vmin=density.max() - 9, aspect="equal")
        axis.plot(*points[shown_class].T, ".", markersize=1.6, color=COLOURS[0], alpha=0.6)
        axis.set_title(f"{name}\n{outside:.1%} outside", fontsize=10)
        axis.set(xlim=extent[:2], ylim=extent[2:])
        axis.set_axis_off()
    save(figure, path)


def _by_seed(rows: Sequence[Row], name: str) -> dict[int, float]:
    return {seed_of(row): number(row, name) for row in rows}


def _shown(interval: Interval, signed: bool = False) -> str:
    sign = "+" if signed else ""
    value = f"{100 * interval.value:{sign}.1f}"
    return f"{value} ± {100 * interval.half_width:.1f}" if interval.bounded else value
