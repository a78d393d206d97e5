"""Noise scale of every timestep bin over the checkpoints of a training."""

import argparse
from itertools import pairwise
from pathlib import Path

from research import gns_cells, gns_plots
from research.cells import Cell, Row
from research.frame import StudyRun, number, step_of
from research.gns_cells import COLUMNS, KEY, UNIT, bin_label, cost, interval_text, measure
from research.gns_trajectory import against_trajectory
from research.pictures import legend_outside, save
from torchtitan.pictures.markdown import markdown_table
from torchtitan.pictures.style import new_figure, note, ordered_colours

MOST_PANELS = 12

__all__ = ["COLUMNS", "KEY", "UNIT", "add_options", "cells", "cost", "measure", "report"]


def add_options(parser: argparse.ArgumentParser) -> None:
    gns_cells.add_options(parser)
    gns_cells.add_setting(parser)
    gns_cells.add_bins(parser)


def cells(run: StudyRun) -> list[Cell]:
    setting, portion = gns_cells.setting(run.options), gns_cells.portion(run.options)
    bins = gns_cells.bins(run)
    return [gns_cells.make_cell(run, step, where, *setting, portion) for step in run.steps for where in bins]


def report(run: StudyRun, rows: list[Row], folder: Path) -> str:
    grid = by_bin(rows)
    text = f"{gns_cells.description(run.options)}\n\n"
    text += markdown_table(
        ["step", *grid],
        (
            [str(step), *(interval_text(row) for row in rows if step_of(row) == step)]
            for step in sorted({step_of(row) for row in rows})
        ),
    )
    text += lines_over_training(run, grid, rows, folder / "lines.png")
    text += bars_per_checkpoint(run, rows, folder / "bars.png")
    text += against_trajectory(run, rows, folder / "trajectory.png")
    if len({step_of(row) for row in rows}) > 1:
        text += deltas_over_training(run, grid, folder / "deltas.png")
    return text


def by_bin(rows: list[Row]) -> dict[str, list[Row]]:
    """Rows of each bin, by its label, in the order of training."""
    grid: dict[str, list[Row]] = {}
    for row in rows:
        grid.setdefault(bin_label(row), []).append(row)
    return grid


def lines_over_training(run: StudyRun, grid: dict[str, list[Row]], rows: list[Row], path: Path) -> str:
    """Plot a line per bin over the training steps, linear and logarithmic."""
    title = f"Gradient noise scale by timestep bin, {run.weights}"
    figure, axes = new_figure(title, columns=2, size=(13.5, 5.2))
    colors = ordered_colours(len(grid))
    for axis, scale in zip(axes[0], ("linear", "log"), strict=True):
        for color, shift, (label, of_bin) in zip(colors, gns_plots.shifts(len(grid)), grid.items(), strict=True):
            gns_plots.draw_line(axis, [step_of(row) for row in of_bin], of_bin, color, label, shift)
        gns_plots.set_scale(axis, rows, scale)
        axis.set_xlabel("training step")
        axis.set_ylabel(gns_plots.NOISE_SCALE)
    legend_outside(axes[0, 1], "timesteps (0 is clean data)")
    note(figure, f"{gns_plots.caption(rows)}")
    return save(figure, path)


def bars_per_checkpoint(run: StudyRun, rows: list[Row], path: Path) -> str:
    """Plot a panel of horizontal bars per checkpoint, on one logarithmic scale."""
    steps = sorted({step_of(row) for row in rows})
    shown = evenly(steps, MOST_PANELS)
    columns = min(len(shown), 3)
    lines = -(-len(shown) // columns)
    title = f"Gradient noise scale per checkpoint, {run.weights}"
    if len(shown) < len(steps):
        title += f" ({len(shown)} of {len(steps)} checkpoints)"
    height = 0.27 * max(len(rows) // max(len(steps), 1), 3) + 0.9
    size = (4.6 * columns + 0.6, lines * height + 1.0)
    figure, axes = new_figure(title, lines, columns, size, sharex=True, sharey=True)
    for axis in axes.flat[len(shown) :]:
        axis.set_visible(False)
    for axis, step in zip(axes.flat, shown, strict=False):
        of_step = [row for row in rows if step_of(row) == step]
        gns_plots.draw_bars(axis, of_step, ordered_colours(len(of_step)))
        axis.set_title(f"step {step}", fontsize=10)
        axis.grid(axis="y", visible=False)
        axis.xaxis.set_tick_params(labelbottom=True)
    axes.flat[0].set_ylim(len(rows) // len(steps) - 0.4, -0.6)
    gns_plots.set_scale(axes.flat[0], rows, "log", along="x")
    note(figure, f"{gns_plots.NOISE_SCALE}\n{gns_plots.caption(rows)}")
    return save(figure, path)


def deltas_over_training(run: StudyRun, grid: dict[str, list[Row]], path: Path) -> str:
    """Plot the change of each bin's value against its value at the previous checkpoint."""
    title = f"Change of the noise scale since the checkpoint before, {run.weights}"
    figure, axes = new_figure(title, size=(9.5, 5))
    for color, (label, rows) in zip(ordered_colours(len(grid)), grid.items(), strict=True):
        if changes := deltas(rows):
            axes[0, 0].plot(*zip(*changes, strict=True), color=color, marker="o", markersize=4, label=label)
    axes[0, 0].axhline(0, color="0.5", linewidth=0.8)
    axes[0, 0].set_yscale("symlog", linthresh=1)
    axes[0, 0].margins(y=0.08)
    axes[0, 0].set_xlabel("training step")
    axes[0, 0].set_ylabel("change (samples; linear within ±1)")
    if axes[0, 0].lines[:-1]:
        legend_outside(axes[0, 0], "timesteps (0 is clean data)")
    note(figure, "between two checkpoints that both have a bounded estimate")
    return save(figure, path)


def deltas(rows: list[Row]) -> list[tuple[int, float]]:
    """Deltas (step, value - the value at the previous row) where both are bounded estimates."""
    changes = []
    for before, row in pairwise(rows):
        if all(one["status"] == "ok" and not gns_cells.is_unbounded(one) for one in (before, row)):
            changes.append((step_of(row), number(row, "gns_est") - number(before, "gns_est")))
    return changes


def evenly(values: list[int], most: int) -> list[int]:
    """Choose at most `most` of the values, evenly spaced, the first and the last among them."""
    if len(values) <= most:
        return values
    return [values[round(place * (len(values) - 1) / (most - 1))] for place in range(most)]
