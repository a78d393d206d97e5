"""Noise scale as an estimate of the critical batch size, per bin and whole, and samples allocated to bins by it.

S / |G|^2 is a proxy of the critical batch size; only branches of a training at several batch sizes measure that. The
published allocations ("p1", "softmax") divide a batch in proportion to noise scales or to their softmax. Neyman's
allocation minimises the variance of the gradient: shares in proportion to mass x sqrt(S) of each bin.
"""

from pathlib import Path

import torch

from research import gns_bins, gns_cells, gns_plots
from research.cells import Cell, Row
from research.frame import StudyRun, number, step_of
from research.gns_cells import (
    COLUMNS,
    KEY,
    UNIT,
    WHOLE_BIN,
    bin_label,
    cost,
    interval_text,
    is_unbounded,
    measure,
)
from research.pictures import legend_outside, save
from research.published_estimator import SOFTMAX_TEMPERATURES, p1_shares, softmax_shares
from torchtitan.gns.allocate import gradient_variance, neyman_shares
from torchtitan.pictures.colours import COLOURS
from torchtitan.pictures.markdown import markdown_table
from torchtitan.pictures.style import new_figure, note, ordered_colours

__all__ = ["COLUMNS", "KEY", "UNIT", "add_options", "cells", "cost", "measure", "report"]

add_options = gns_bins.add_options
TITLE = "Estimate of the critical batch size"

_NO_FLOOR = 1e-12  # these shares are only compared


def cells(run: StudyRun) -> list[Cell]:
    setting, portion = gns_cells.setting(run.options), gns_cells.portion(run.options)
    bins = [*gns_cells.bins(run), WHOLE_BIN]
    return [gns_cells.make_cell(run, step, where, *setting, portion) for step in run.steps for where in bins]


def report(run: StudyRun, rows: list[Row], folder: Path) -> str:
    whole = [row for row in rows if not row["t_min"]]
    binned = [row for row in rows if row["t_min"]]
    allocations = {row_step: found for row_step in run.steps if (found := _allocations(binned, row_step))}
    text = (
        f"{gns_cells.description(run.options)}\n\nThe noise scale is a proxy: the critical batch size itself takes a "
        "test with branches of the training at several batch sizes.\n\n"
    )
    text += markdown_table(
        ["step", *(bin_label(row) for row in rows if step_of(row) == run.steps[0])],
        ([str(step), *(interval_text(row) for row in rows if step_of(row) == step)] for step in run.steps),
    )
    text += _training_picture(run, whole, binned, folder / "training.png")
    if allocations:
        text += _shares_picture(run, binned, allocations, folder / "allocations.png")
        text += "## Variance of the gradient relative to a batch in proportion to the training density\n\n"
        names = list(dict.fromkeys(name for found in allocations.values() for name in found))
        text += "With strata and weights that keep the gradient unbiased; below 1 is better.\n\n"
        text += markdown_table(
            ["step", *names],
            ([str(step), *(_variance_text(found.get(name)) for name in names)] for step, found in allocations.items()),
        )
    left_out = [step for step in run.steps if "p1" not in allocations.get(step, {})]
    if left_out:
        steps = ", ".join(map(str, left_out))
        text += f"No p1 and softmax where a bin has no bounded, positive estimate: steps {steps}.\n\n"
    return text


def _variance_text(entry: tuple[list[float], float] | None) -> str:
    if entry is None:
        return ""
    return f"{entry[1]:.3g}" if entry[1] < 1000 else "> 1000"


def _allocations(binned: list[Row], step: int) -> dict[str, tuple[list[float], float]]:
    """Allocations (shares, relative variance) by name; empty where a bin has no estimate."""
    rows = [row for row in binned if step_of(row) == step]
    if not rows or any(row["status"] != "ok" for row in rows):
        return {}
    masses, noises = [number(row, "mass") for row in rows], [number(row, "noise") for row in rows]
    if sum(noises) <= 0 or min(noises) < 0:
        return {}
    mass, noise = (torch.tensor(values, dtype=torch.float64) for values in (masses, noises))
    shares = {"Neyman": neyman_shares(mass, noise, floor=_NO_FLOOR).tolist()}
    scales = [number(row, "gns_est") for row in rows]
    if min(scales) > 0 and not any(is_unbounded(row) for row in rows):
        shares["p1"] = p1_shares(scales)
        shares |= {f"softmax {heat}": softmax_shares(scales, heat) for heat in SOFTMAX_TEMPERATURES}
    present = gradient_variance(mass, mass, noise, stratified=True)

    def relative(found: list[float]) -> float:
        variance = gradient_variance(mass, torch.tensor(found, dtype=torch.float64), noise, stratified=True)
        return (variance / present).item()

    return {name: (found, relative(found)) for name, found in shares.items()}


def _training_picture(run: StudyRun, whole: list[Row], binned: list[Row], path: Path) -> str:
    figure, axes = new_figure(f"{TITLE} over training, {run.weights}", size=(10, 5.4))
    axis = axes[0, 0]
    grid = gns_bins.by_bin(binned)
    colors, shifts = ordered_colours(len(grid)), gns_plots.shifts(len(grid) + 1)
    for color, shift, (label, of_bin) in zip(colors, shifts, grid.items(), strict=False):
        gns_plots.draw_line(axis, [step_of(row) for row in of_bin], of_bin, color, label, shift)
    gns_plots.draw_line(axis, [step_of(row) for row in whole], whole, COLOURS[1], "all timesteps", shifts[-1])
    gns_plots.set_scale(axis, [*whole, *binned], "log")
    axis.set_xlabel("training step")
    axis.set_ylabel("gradient noise scale, a proxy (samples)")
    legend_outside(axis, "timesteps (0 is clean data)")
    note(figure, gns_plots.caption(whole + binned))
    return save(figure, path)


def _shares_picture(run: StudyRun, binned: list[Row], allocations: dict, path: Path) -> str:
    shown = gns_bins.evenly(list(allocations), 6)
    columns = min(len(shown), 2)
    lines = -(-len(shown) // columns)
    figure, axes = new_figure(
        f"Samples allocated to bins from the estimates, {run.weights}", lines, columns,
        (7.2 * columns + 0.6, 3.1 * lines + 1.3), sharey=True,
    )  # fmt: skip
    for axis in axes.flat[len(shown) :]:
        axis.set_visible(False)
    colors = {"Neyman": "black", "p1": COLOURS[1]}
    colors |= {f"softmax {heat}": color for heat, color in zip(SOFTMAX_TEMPERATURES, ordered_colours(4), strict=True)}
    for axis, step in zip(axes.flat, shown, strict=False):
        rows = [row for row in binned if step_of(row) == step]
        found = allocations[step]
        for place, (name, color) in enumerate(colors.items()):
            xs = [bin_ + (place - 0.5 * (len(colors) - 1)) * 0.8 / len(colors) for bin_ in range(len(rows))]
            if name in found:
                shares = [100 * share for share in found[name][0]]
                axis.bar(xs, shares, width=0.8 / len(colors), color=color, label=name)
        if len(found) == 1:
            axis.text(0.5, 0.9, "no p1 and softmax: a bin has no bounded estimate", transform=axis.transAxes,
                      ha="center", fontsize=8, color="0.35")  # fmt: skip
        masses = [100 * number(row, "mass") for row in rows]
        axis.hlines(masses, [place - 0.45 for place in range(len(rows))], [place + 0.45 for place in range(len(rows))],
                    color="0.45", linestyle="--", linewidth=1, label="training density")  # fmt: skip
        names = [bin_label(row).split("[")[1].rstrip(")") for row in rows]
        axis.set_xticks(range(len(rows)), names, fontsize=7, rotation=35)
        axis.set_title(f"step {step}", fontsize=10)
        axis.set_ylim(0, 100)
        axis.grid(axis="x", visible=False)
        axis.set_xlabel(f"bin in {bin_label(rows[0]).split()[0]}, from, to", fontsize=9)
    for axis in axes[:, 0]:
        axis.set_ylabel("share of the batch (%)")
    fullest = max(axes.flat, key=lambda axis: len(axis.get_legend_handles_labels()[1]))
    legend_outside(axes[0, columns - 1], entries_of=fullest)
    note(figure, "Neyman minimises the gradient's variance; p1 and softmax as published, for comparison only")
    return save(figure, path)
