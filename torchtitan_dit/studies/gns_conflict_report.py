"""Report of conflict matrices from their records alone: statistics, decision and pictures.

    scripts/study.py gns_conflict_report FOLDER... [--cells N]
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from torchtitan.experiments.cells import Row
from torchtitan.experiments.folder import StudyError
from torchtitan.pictures.colours import COLOURS
from torchtitan.pictures.markdown import markdown_table
from torchtitan.pictures.style import new_figure, note, ordered_colours, save, write_cells
from torchtitan.statistics.interval import Interval
from torchtitan_dit.studies.gns_calibration_statistics import UPDATES
from torchtitan_dit.studies.gns_conflict_statistics import (
    MOVES,
    Effects,
    Finding,
    effects,
    finding,
    predicts,
    refuted,
)
from torchtitan_dit.studies.records import Protocol, add_report_options, report_records

_OF_UPDATE = ("step_size", "products", "products_se", "signals", "signals_se")
PROTOCOL = Protocol(  # docs/critical_batch.md
    study="gns_conflict",
    needed={
        "status", "reason", *(f"{update}_{name}" for update in UPDATES for name in _OF_UPDATE),
        *(f"{update}_{move}_{kind}" for update in UPDATES for move in MOVES for kind in ("change", "change_se", "along")),
    },
    key=("data", "run_seed", "model", "checkpoint", "edges", "bin", "samples", "batch", "several", "several_batch", "held",
         "dtype", "seed"),
    cell=("data", "run_seed", "step", "edges", "bin"),
    part=("data", "run_seed"),
    parts=tuple(("digits", seed) for seed in ("0", "1", "2")),
    cells=40,  # four ages of ten bins
)  # fmt: skip
_TITLES = {"small": "a tenth of a step", "whole": "one step", "several": "{several} steps"}


def add_options(parser: argparse.ArgumentParser) -> None:
    add_report_options(parser, PROTOCOL)


def run_alone(arguments: argparse.Namespace) -> Path:
    """Read the records, write pictures and summary.md; return the latter. Raises StudyError."""
    return report_records(arguments, PROTOCOL, report_text)


def report_text(rows: Sequence[Row], folder: Path, protocol: Protocol = PROTOCOL) -> str:
    """Statistics, verdict if all cells of the protocol are there, and the pictures, written into the folder."""
    known = [row for row in rows if row["status"] == "ok"]
    text = f"Cells with an answer: {protocol.counts(known)}.\n\n"
    if len({len(row["edges"].split()) for row in known}) > 1:
        raise StudyError("the records are of different numbers of bins")
    for update in UPDATES:
        measured = {move: effects(known, update, move) for move in MOVES}
        found = {move: finding(measured[move]) for move in MOVES}
        text += f"## Update {update}\n\n" + _table(found)
        if any(one.diverged for one in measured.values()):
            counts = ", ".join(f"{move} in {one.diverged} of {one.cells} cells" for move, one in measured.items())
            text += f"Diverged, and not in these statistics: {counts}.\n\n"
        diverges = {move: one.diverges for move, one in measured.items()}
        text += _verdicts(found, diverges) if protocol.is_complete(known) else protocol.interim(known)
        text += _by_age(known, update)
        if known:
            name = f"conflict_{update}.png"
            draw_matrices(known, update, measured, folder / name)
            text += f"![Predicted and measured effects, {update} update]({name})\n\n"
    if known:
        draw_points(known, folder / "conflict_points.png")
        text += "![Measured against predicted](conflict_points.png)\n\n"
    return text


def _table(found: dict[str, Finding | None]) -> str:
    header = ["move", "correlation", "rank", "slope", "slope, real displacement", "equal signs (resolved pairs)", "own bin",
              "conflicts, harms", "resolved, pairs, left out"]  # fmt: skip
    lines = []
    for move, one in found.items():
        if one is None:
            lines.append([move, *["too little"] * (len(header) - 1)])
            continue
        intervals = (one.correlation, one.rank, one.slope, one.slope_along, one.signs, one.own)
        numbers = (f"{one.conflicts}, {one.harms}", f"{one.resolved}, {one.pairs}, {one.left_out}")
        lines.append([move, *map(_text, intervals), *numbers])
    return markdown_table(header, lines)


def _verdicts(found: dict[str, Finding | None], diverges: dict[str, bool]) -> str:
    words = []
    for move, one in found.items():
        if diverges[move]:
            words.append(f"{move}: refuted (diverges)")
        elif one is None:
            words.append(f"{move}: no answer")
        else:
            words.append(f"{move}: {'predicted' if predicts(one) else 'refuted' if refuted(one) else 'undecided'}")
    return "; ".join(words) + ".\n\n"


def _by_age(rows: Sequence[Row], update: str) -> str:
    """Table of correlation and slope at each age, where runs of several seeds allow one."""
    lines = []
    for step in sorted({int(row["step"]) for row in rows}):
        of_age = [row for row in rows if int(row["step"]) == step]
        line = [str(step)]
        for move in MOVES:
            one = finding(effects(of_age, update, move))
            values = [] if one is None else [one.correlation, one.slope, one.signs]
            line += [f"{each.value:.2f}" for each in values] or ["too little"] * 3
        lines.append(line)
    header = ["step", *(f"{name}, {move}" for move in MOVES for name in ("correlation", "slope", "signs"))]
    return "By age, without intervals:\n\n" + markdown_table(header, lines)


def _text(found: Interval) -> str:
    return f"{found.value:.3g} [{found.lower:.3g}, {found.upper:.3g}]"


# ---------------------------------------------------------------------- pictures


def draw_matrices(rows: Sequence[Row], update: str, measured: dict[str, Effects], path: Path) -> None:
    """Draw the predicted and the three measured matrices of the last age, means over its checkpoints, side by side."""
    last = max(int(row["step"]) for row in rows)
    of_last = [row for row in rows if int(row["step"]) == last]
    bins = len(rows[0]["edges"].split()) - 1
    shown = {move: effects(of_last, update, move) for move in measured}
    matrices = {"predicted, first order": _mean_matrix(shown["small"], shown["small"].predicted, bins)}
    for move, found in shown.items():
        title = "measured, " + _TITLES[move].format(several=rows[0]["several"])
        matrices[title] = _mean_matrix(found, found.changed, bins)
    figure, axes = new_figure(
        f"Effect of training one timestep bin on the others, {update} update, step {last}", 2, 2, (9, 9.4)
    )
    low = [f"{float(edge):.2f}" for edge in rows[0]["edges"].split()[:-1]]
    for panel, (title, matrix) in zip(axes.flat, matrices.items(), strict=True):
        panel.imshow(matrix, vmin=-1, vmax=1, cmap="RdBu", origin="lower")
        texts = [[_short(value) for value in line] for line in matrix]
        write_cells(panel, matrix, texts, lambda value: abs(value) > 0.6)
        panel.set_facecolor("0.85")
        panel.grid(visible=False)
        panel.set_title(title, fontsize=11)
        panel.set_xticks(range(bins), low, rotation=60)
        panel.set_yticks(range(bins), low)
        panel.set_xlabel("trained bin, from t")
        panel.set_ylabel("loss of the bin, from t")
    note(figure, "decrease of the loss / (step size x steps x √(M_bb M_cc)); blue: helps, red: harms; grey: not known")
    save(figure, path)


def _mean_matrix(found: Effects, values: np.ndarray, bins: int) -> np.ndarray:
    """Mean over checkpoints of a matrix [measured, trained]; NaN where there is none."""
    sums, counts = np.zeros((bins, bins)), np.zeros((bins, bins))
    np.add.at(sums, (found.measured, found.trained), values)
    np.add.at(counts, (found.measured, found.trained), 1)
    with np.errstate(invalid="ignore"):
        return sums / counts


def _short(value: float) -> str:
    if not np.isfinite(value):
        return ""
    text = f"{value:.1f}"
    return "0" if float(text) == 0 else text.replace("0.", ".", 1)


def draw_points(rows: Sequence[Row], path: Path) -> None:
    """Draw measured against predicted effects of pairs of different bins, a panel per update and move."""
    figure, axes = new_figure("Measured effect on another bin against the first-order prediction", 2, 3, (10, 6.8), sharex=True)
    ages = sorted({int(row["step"]) for row in rows})
    for panels, update in zip(axes, UPDATES, strict=True):
        for panel, move in zip(panels, MOVES, strict=True):
            for color, age in zip(ordered_colours(len(ages)), ages, strict=True):
                found = effects([row for row in rows if int(row["step"]) == age], update, move)
                other = found.trained != found.measured
                panel.plot(found.predicted[other], found.changed[other], ".", color=color, markersize=3, label=f"step {age}")
            ends = (-1.0, 1.0)
            panel.plot(ends, ends, "--", color="0.5", linewidth=0.8)
            panel.axhline(0, color=COLOURS[7], linewidth=0.6)
            panel.set_title(f"{update}, {_TITLES[move].format(several=rows[0]['several'])}", fontsize=10)
        panels[0].set_ylabel("measured")
    for panel in axes[-1]:
        panel.set_xlabel("predicted: cosine of the bins' gradients")
    axes[0, 0].legend(fontsize=8, frameon=False, markerscale=2)
    note(figure, "both divided by step size x steps x √(M_bb M_cc); dashed: first order")
    save(figure, path)

