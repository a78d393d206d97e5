"""Spread and run time of the estimate over a grid of (b, B, reps), at one checkpoint or several."""

import argparse
from pathlib import Path
from statistics import fmean, stdev

from research import gns_cells, gns_plots
from research.cells import Cell, Row
from research.frame import StudyRun, number, run_seconds, step_of
from research.gns_cells import COLUMNS, KEY, UNIT, WHOLE_BIN, cost, good, is_unbounded, measure
from research.pictures import legend_outside, save
from torchtitan.experiments.folder import StudyError
from torchtitan.pictures.markdown import markdown_table
from torchtitan.pictures.style import new_figure, note, ordered_colours

# b, B / b and reps where the options say nothing.
GRIDS = {"published": ([50, 100], [10, 100], [2, 5]), "correct": ([8, 32], [4, 16], [8, 16])}

__all__ = ["COLUMNS", "KEY", "UNIT", "add_options", "cells", "cost", "measure", "report"]


def add_options(parser: argparse.ArgumentParser) -> None:
    gns_cells.add_options(parser)
    add = parser.add_argument
    add("--small", type=int, nargs="+", metavar="b",
        help="samples in a group or small batch (correct: 8 32, published: 50 100)")  # fmt: skip
    add("--factors", type=int, nargs="+", metavar="B/b", help="B as a multiple of b (correct: 4 16, published: 10 100)")
    add("--reps", type=int, nargs="+", help="blocks or pairs of batches (correct: 8 16, published: 2 5)")
    add("--repeats", type=int, default=4, help="measurements of every setting, for its spread (default: 4)")
    add("--true-portion", type=float, metavar="SHARE",
        help="published only: share of the data behind the logged gradient norm (default: 0.1)")  # fmt: skip


def cells(run: StudyRun) -> list[Cell]:
    options = run.options
    if options.repeats < 1:
        raise StudyError(f"--repeats: must be at least 1, is {options.repeats}")
    smalls, factors, repetitions = (
        default if given is None else given
        for given, default in zip((options.small, options.factors, options.reps), GRIDS[options.estimator], strict=True)
    )
    settings = [(b, b * factor, reps) for b in smalls for factor in factors for reps in repetitions]
    for one in settings:
        gns_cells.check_setting(options, *one)
    portion = gns_cells.portion(options)
    return [
        gns_cells.make_cell(run, step, WHOLE_BIN, *one, portion, repeat)
        for step in run.steps
        for one in settings
        for repeat in range(options.repeats)
    ]


def report(run: StudyRun, rows: list[Row], folder: Path) -> str:
    steps = sorted({step_of(row) for row in rows})
    settings = list(dict.fromkeys(_setting(row) for row in rows))
    height = 0.34 * len(settings) + 1.9
    figure, axes = new_figure(
        f"Noise scale by setting, {run.weights}", columns=2, size=(13, max(height, 4)), sharey=True
    )
    for place, (color, step) in enumerate(zip(ordered_colours(len(steps)), steps, strict=True)):
        middle = (place - 0.5 * (len(steps) - 1)) * 0.8 / len(steps)
        of_step = [row for row in good(rows) if step_of(row) == step]
        repeats = 1 + max((int(row["repeat"]) for row in of_step), default=0)
        for row in of_step:
            y = settings.index(_setting(row)) + middle + 0.6 / len(steps) * ((int(row["repeat"]) + 0.5) / repeats - 0.5)
            axes[0, 1].plot([run_seconds(row)], [y], marker="o", markersize=4, color=color)
            if is_unbounded(row):
                gns_plots.draw_arrow(axes[0, 0], number(row, "lower"), y, color, sideways=True)
                continue
            if row["lower"]:
                axes[0, 0].hlines(y, number(row, "lower"), number(row, "upper"), color=color, linewidth=1, alpha=0.6)
            axes[0, 0].plot([number(row, "gns_est")], [y], marker="o", markersize=4, color=color)
        axes[0, 1].plot([], [], marker="o", color=color, linestyle="none", label=f"step {step}")
    gns_plots.set_scale(axes[0, 0], rows, "log", along="x")
    axes[0, 0].set_yticks(range(len(settings)), [_name(setting) for setting in settings], fontsize=8)
    axes[0, 0].set_ylim(len(settings) - 0.4, -0.6)
    axes[0, 0].set_xlabel(gns_plots.NOISE_SCALE)
    axes[0, 1].set_xlabel("run time of one estimate (s)")
    axes[0, 1].set_xlim(left=0)
    legend_outside(axes[0, 1])
    note(figure, gns_plots.caption(rows))
    return (
        f"{gns_cells.description(run.options)}\n\n{_table(rows, steps, settings)}"
        + save(figure, folder / "hyperparameters.png")
    )


def _table(rows: list[Row], steps: list[int], settings: list[tuple[int, int, int]]) -> str:
    lines = []
    for step in steps:
        for setting in settings:
            same = [row for row in rows if step_of(row) == step and _setting(row) == setting]
            bounded = [number(row, "gns_est") for row in good(same) if not is_unbounded(row)]
            lines.append([
                str(step), _name(setting), f"{len(bounded)} of {len(same)}",
                f"{fmean(bounded):.4g}" if bounded else "", f"{stdev(bounded):.2g}" if len(bounded) > 1 else "",
                f"{fmean(run_seconds(row) for row in same):.2f}",
            ])  # fmt: skip
    return markdown_table(["step", "setting", "bounded estimates", "mean", "standard deviation", "seconds each"], lines)


def _setting(row: Row) -> tuple[int, int, int]:
    return int(row["b"]), int(row["B"]), int(row["reps"])


def _name(setting: tuple[int, int, int]) -> str:
    return "b = {}, B = {}, reps = {}".format(*setting)
