"""Accuracy of the estimate against the share of the data behind the reference gradient.

The right estimator uses the share itself: its estimates agree and their intervals narrow. The published one draws its
batches (b, B) whatever the share is; only the logged norm of the reference gradient changes, by the bias S / n of
|g|^2.
"""

import argparse
from pathlib import Path

from research import gns_cells, gns_plots
from research.cells import Cell, Row
from research.frame import StudyRun, number, step_of
from research.gns_cells import COLUMNS, KEY, UNIT, WHOLE_BIN, cost, good, interval_text, measure
from research.pictures import legend_outside, save
from torchtitan.experiments.folder import StudyError
from torchtitan.pictures.markdown import markdown_table
from torchtitan.pictures.style import new_figure, note, ordered_colours

__all__ = ["COLUMNS", "KEY", "UNIT", "add_options", "cells", "cost", "measure", "report"]


def add_options(parser: argparse.ArgumentParser) -> None:
    gns_cells.add_options(parser)
    add = parser.add_argument
    add("--portions", type=float, nargs="+", default=[0.1, 0.2, 0.5, 1.0], metavar="SHARE",
        help="shares of the data; above 1, images come again at other timesteps (default: 0.1 0.2 0.5 1)")  # fmt: skip
    add("--small", type=int, metavar="b", help="samples in a group (correct: at most 32, so that a block has two) or "
        "in the small batch (published: 25)")  # fmt: skip
    add("--large", type=int, metavar="B", help="published only: samples in the large batch (2500)")
    add("--reps", type=int, help="blocks that the share is divided into (correct: 16), or pairs (published: 5)")
    add("--repeats", type=int, default=1, help="measurements of every share (default: 1)")


def cells(run: StudyRun) -> list[Cell]:
    options = run.options
    if options.repeats < 1:
        raise StudyError(f"--repeats: must be at least 1, is {options.repeats}")
    if options.estimator == "correct" and options.large is not None:
        raise StudyError("--large: the correct estimator's blocks follow from the share and --reps (leave it out)")
    for portion in options.portions:
        if not 0 < portion < float("inf"):
            raise StudyError(f"--portions: {portion:g} is not positive")
    return [
        gns_cells.make_cell(run, step, WHOLE_BIN, *_setting(run, portion), portion, repeat)
        for step in run.steps
        for portion in sorted(set(options.portions))
        for repeat in range(options.repeats)
    ]


def _setting(run: StudyRun, portion: float) -> tuple[int, int, int]:
    options = run.options
    if options.estimator == "published":
        b, big_b, reps = options.small or 25, options.large or 2500, options.reps or 5
    else:
        reps = 16 if options.reps is None else options.reps
        big_b = round(portion * len(run.dataset(options.split))) // max(reps, 1)
        b = min(32, big_b // 2) if options.small is None else options.small
        if big_b < 2:
            raise StudyError(f"--portions: {portion:g} of the data is too little for {reps} blocks of two samples")
    gns_cells.check_setting(options, b, big_b, reps)
    return b, big_b, reps


def report(run: StudyRun, rows: list[Row], folder: Path) -> str:
    steps = sorted({step_of(row) for row in rows})
    figure, axes = new_figure(
        f"Noise scale against the data used, {run.weights}", columns=2, size=(14.5, 4.8)
    )
    for axis in axes[0]:
        axis.set_xscale("log")
    colors, shifts = ordered_colours(len(steps)), gns_plots.shifts(len(steps))
    for color, shift, step in zip(colors, shifts, steps, strict=True):
        of_step = sorted((row for row in rows if step_of(row) == step), key=_share)
        shares = [100 * _share(row) for row in of_step]
        gns_plots.draw_line(axes[0, 0], shares, of_step, color, f"step {step}", shift)
        known = good(of_step)
        xs = [100 * _share(row) for row in known]
        axes[0, 1].plot(xs, [number(row, "g_norm") ** 2 for row in known], color=color, marker="o", markersize=4,
                        label=f"step {step}: |g|² of a mean gradient")  # fmt: skip
        axes[0, 1].plot(xs, [number(row, "signal") for row in known], color=color, marker="s", markersize=4,
                        linestyle="--", label=f"step {step}: estimate of |G|²")  # fmt: skip
    gns_plots.set_scale(axes[0, 0], rows, "log")
    axes[0, 0].set_ylabel(gns_plots.NOISE_SCALE)
    axes[0, 1].set_ylabel("squared gradient norm (loss² per squared weight)")
    axes[0, 1].axhline(0, color="0.5", linewidth=0.8)
    for axis in axes[0]:
        axis.set_xlabel("data used (% of the split)")
        shares = sorted({float(f"{100 * _share(row):.2g}") for row in rows})
        axis.set_xticks(shares, [f"{share:g}" for share in shares])
        axis.set_xticks([], minor=True)
    legend_outside(axes[0, 1])
    note(figure, gns_plots.caption(rows))
    table = markdown_table(
        ["step", "share", "samples behind the norm", "noise scale", "norm of their mean gradient"],
        (
            [str(step_of(row)), f"{_share(row):.3g}", row["b_true"], interval_text(row), f"{number(row, 'g_norm'):.4g}"]
            for row in rows
        ),
    )
    return f"{gns_cells.description(run.options)}\n\n{table}" + save(figure, folder / "accuracy.png")


def _share(row: Row) -> float:
    return number(row, "true_portion")
