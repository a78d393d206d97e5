"""Report of noise scales along a training from their records alone: statistics, decision and picture.

    scripts/study.py gns_lags_report FOLDER... [--cells N]
"""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes

from torchtitan.experiments.cells import Row
from torchtitan.pictures.colours import COLOURS
from torchtitan.pictures.markdown import markdown_table
from torchtitan.pictures.style import label_log_axis, new_figure, note, ordered_colours, save
from torchtitan.statistics.interval import Interval
from torchtitan_dit.studies.frame import number
from torchtitan_dit.studies.gns_lags_statistics import (
    Finding,
    averaging_closer,
    cosine_means,
    explained,
    finding,
    frozen,
    logged,
    window,
)
from torchtitan_dit.studies.records import Protocol, add_report_options, numbers_of, report_records

PICTURE = "lags.png"
PROTOCOL = Protocol(  # docs/critical_batch.md
    study="gns_lags",
    needed={
        "step", "bin", "status", "reason", "points", "b", "b_lower", "b_upper", "window", "window_lower", "window_upper",
        "lags", "cosines", "cosines_se", "logged", "logged_lower", "logged_upper", "logged_lag", "logged_estimator",
    },
    key=("data", "run_seed", "model", "checkpoint", "back", "samples", "dtype", "seed", "t_min", "t_max", "bin_unit"),
    cell=("data", "run_seed", "step", "t_min", "t_max"),
    part=("data", "run_seed"),
    parts=(("digits", "0"),),
    cells=40,  # four ages of ten bins
)  # fmt: skip


def add_options(parser: argparse.ArgumentParser) -> None:
    add_report_options(parser, PROTOCOL)


def run_alone(arguments: argparse.Namespace) -> Path:
    """Read the records, write picture and summary.md; return the latter. Raises StudyError."""
    return report_records(arguments, PROTOCOL, report_text)


def report_text(rows: Sequence[Row], folder: Path, protocol: Protocol = PROTOCOL) -> str:
    """Tables, verdict if all cells of the protocol are there, and the picture, written into the folder."""
    known = [row for row in rows if row["status"] == "ok"]
    text = f"Cells with an answer: {protocol.counts(known)}. Plain geometry.\n\n"
    if not known:
        return text
    ages = sorted({int(row["step"]) for row in known})
    whole = finding(known)
    by_age = {str(age): finding([row for row in known if int(row["step"]) == age]) for age in ages}
    text += "## Ratios\n\n" + _ratios(by_age | {"all": whole})
    text += _verdict(known, whole) if protocol.is_complete(known) else protocol.interim(known)
    text += "## Cosine of the mean gradient by lag\n\nMeans over bins.\n\n" + _cosines(known, ages)
    text += "## Cells\n\n" + _cells(known)
    draw_picture(known, folder / PICTURE)
    return text + f"![Noise scale of checkpoints, of windows and of the log]({PICTURE})\n\n"


def _ratios(found: dict[str, Finding]) -> str:
    header = ["step", "frozen B / logged B", "beyond 1.5, 2", "window B / logged B", "beyond 1.5, 2", "cells with both", "cells",
              "swing above sampling alone"]  # fmt: skip
    lines = [
        [name, _text(one.frozen), _counts(one.frozen_ratios), _text(one.window), _counts(one.window_ratios),
         f"{len(one.frozen_ratios)}, {len(one.window_ratios)}", str(one.cells), f"{one.swings} of {one.swing_cells}"]
        for name, one in found.items()
    ]  # fmt: skip
    return markdown_table(header, lines)


def _verdict(rows: Sequence[Row], whole: Finding) -> str:
    closer, both = averaging_closer(rows)
    swings, turns, averages = explained(rows, whole)
    words = {True: "holds", False: "fails"}
    return (
        f"(a) swings beyond sampling in half of the cells: {words[swings]}. (b) cosine below 0.5 at lags of 8 and more: "
        f"{words[turns]}. (c) the window is closer to the log than the checkpoint in {closer} of {both} cells: "
        f"{words[averages]}.\n\n"
    )


def _cosines(rows: Sequence[Row], ages: Sequence[int]) -> str:
    found = {str(age): cosine_means([row for row in rows if int(row["step"]) == age]) for age in ages}
    found["all"] = cosine_means(rows)
    header = ["step", *(f"lag {lag}" for lag in found["all"])]
    return markdown_table(header, ([name, *map(_text, means.values())] for name, means in found.items()))


def _cells(rows: Sequence[Row]) -> str:
    header = ["step", "bin", "frozen B", "window B", "logged B", "its lag (steps), estimator", "smallest and largest frozen B"]
    lines = []
    for row in rows:
        bounded = [b for b, upper in zip(numbers_of(row, "b"), numbers_of(row, "b_upper"), strict=True) if math.isfinite(upper)]
        ends = f"{min(bounded):.3g}, {max(bounded):.3g} ({len(bounded)})" if bounded else ""
        lag = f"{number(row, 'logged_lag'):.0f}, {row['logged_estimator']}" if row["logged_lag"] else ""
        lines.append([row["step"], row["bin"], *(_scale(of(row)) for of in (frozen, window, logged)), lag, ends])
    return markdown_table(header, lines)


def _counts(ratios: Sequence[float]) -> str:
    beyond = [sum(abs(math.log(ratio)) > math.log(limit) for ratio in ratios) for limit in (1.5, 2.0)]
    return ", ".join(map(str, beyond))


def _text(found: Interval) -> str:
    return "" if math.isnan(found.value) else f"{found.value:.2f} [{found.lower:.2f}, {found.upper:.2f}]"


def _scale(found: Interval) -> str:
    if math.isnan(found.lower):
        return ""
    if not found.bounded:
        return f"> {found.lower:.3g}" if found.lower > 0 else "unbounded"
    return f"{found.value:.3g} [{found.lower:.3g}, {found.upper:.3g}]"


# ---------------------------------------------------------------------- picture


def draw_picture(rows: Sequence[Row], path: Path) -> None:
    """Draw for each age the noise scales of all bins above, and the cosine by lag below."""
    ages = sorted({int(row["step"]) for row in rows})
    figure, axes = new_figure(
        "Noise scale at checkpoints, over their window and in the log", 2, len(ages), (max(2.7 * len(ages), 6.0), 6.4),
        sharey="row",
    )  # fmt: skip
    for above, below, age in zip(*axes, ages, strict=True):
        of_age = [row for row in rows if int(row["step"]) == age]
        for row in of_age:
            _draw_scales(above, row)
        above.set_title(f"step {age}", fontsize=11)
        above.set_xticks(range(len(of_age)), [f"{float(row['t_min']):.2f}" for row in of_age], rotation=60)
        above.set_xlabel("bin, from t")
        for color, row in zip(ordered_colours(len(of_age)), of_age, strict=True):
            below.plot(numbers_of(row, "lags"), numbers_of(row, "cosines"), color=color, linewidth=0.9, alpha=0.7)
        means = cosine_means(of_age)
        lags = [int(lag) for lag in means]
        below.plot(lags, [one.value for one in means.values()], color="black", linewidth=2.2, label="mean of the bins")
        below.axhline(0, color="0.5", linewidth=0.8)
        below.set_xscale("log", base=2)
        below.set_xticks(lags, [str(lag) for lag in lags])
        below.set_xlabel("lag (steps)")
    axes[0, 0].set_yscale("log")
    label_log_axis(axes[0, 0])
    axes[0, 0].set_ylabel("noise scale (samples)")
    axes[1, 0].set_ylabel("cosine of the mean gradients")
    axes[1, 0].set_ylim(-1.05, 1.05)
    for color, name in zip(("0.65", *COLOURS[:3]), ("checkpoints before", "checkpoint", "window", "log"), strict=True):
        axes[0, 0].plot([], [], "o", color=color, markersize=4, label=name)
    axes[0, -1].legend(*axes[0, 0].get_legend_handles_labels(), fontsize=8, frameon=False, ncols=2, loc="lower center")
    axes[1, 0].legend(fontsize=8, frameon=False)
    note(figure, "plain geometry; bars: 95 % intervals, unbounded ones left out; lines below: bins, dark to bright from t = 0")
    save(figure, path)


def _draw_scales(panel: Axes, row: Row) -> None:
    place = int(row["bin"])
    for b, upper in zip(numbers_of(row, "b")[:-1], numbers_of(row, "b_upper")[:-1], strict=True):
        if math.isfinite(upper):
            panel.plot(place, b, ".", color="0.65", markersize=3)
    for shift, color, found in zip((-0.22, 0.0, 0.22), COLOURS, (frozen(row), window(row), logged(row)), strict=False):
        if found.bounded:
            panel.vlines(place + shift, max(found.lower, 1e-2), found.upper, color=color, linewidth=1.2)
            panel.plot(place + shift, found.value, "o", color=color, markersize=3.5)
