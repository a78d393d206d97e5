"""Report of `alignment_noise`: what stops of an alignment change, and the two gradients over training and by timestep bin."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from research.pictures import legend_outside, save
from research.rank_correlation import spearman
from torchtitan.pictures.markdown import Markdown, markdown_table
from torchtitan.pictures.style import error_bar, new_figure, note, ordered_colours
from torchtitan.statistics.interval import mean_interval

Row = Mapping[str, str]
Found = Mapping[tuple[str, int, str], Row]  # rows of runs by arm, seed and stop
_STOPS = {"": "never", "third": "after a third", "rule": "by rule"}
# Measure -> change of one row against another, its decimals and unit.
_MEASURES: dict[str, tuple[Callable[[Row, Row], float], tuple[int, str]]] = {
    "held-out flow loss": (lambda row, other: _change_at(row, other, -1), (1, "%")),
    "recognised": (lambda row, other: 100 * (float(row["accuracy"]) - float(other["accuracy"])), (1, "points")),
    "ln FD": (lambda row, other: math.log(float(row["fd"]) / float(other["fd"])), (2, "")),
}


def write(found: Found, rows: Sequence[Row], arms: Sequence[str], seeds: int, folder: Path) -> str:
    """Draw the picture into the folder; return the text of the summary."""
    plain, *aligned = arms
    text = f"{len(found)} of {seeds * (1 + len(_STOPS) * len(aligned))} runs have ended; one by rule that never stopped, or at "
    text += "the fixed stop, counts as ended with its twin. Changes are paired by seed, with 95 % intervals by Student's t over "
    text += f"seeds; bold: the interval excludes 0.\n\n## Against {plain}\n\n"
    text += _outcomes(found, [((arm, stop), (plain, "")) for arm in aligned for stop in _STOPS])
    text += "## The rule against other stops\n\n"
    text += _outcomes(found, [((arm, "rule"), (arm, stop)) for arm in aligned for stop in ("", "third")])
    for arm in aligned:
        if of_arm := [row for row in rows if row["arm"] == arm]:
            text += f"## {arm}, by age\n\n" + _by_age(_pairs(found, (arm, ""), (plain, "")), of_arm)
            text += f"## {arm}, by timestep bin\n\n" + _by_bin(of_arm)
    return text + (_draw(rows, folder / "alignment_noise.png") if rows else "")


def _outcomes(found: Found, compared: Sequence[tuple[tuple[str, str], tuple[str, str]]]) -> str:
    """Table of changes of runs (arm, stop) against others."""
    lines = []
    for (arm, stop), other in compared:
        pairs = _pairs(found, (arm, stop), other)
        at = f" ({', '.join(row['stop'] or 'never' for row, _ in pairs)})" if stop == "rule" and pairs else ""
        against = other[0] if other[0] != arm else _STOPS[other[1]]
        flops = np.mean([float(row["flops_per_image"]) / float(its["flops_per_image"]) for row, its in pairs]) if pairs else 1.0
        changes = [_text([change(*pair) for pair in pairs], *form) for change, form in _MEASURES.values()]
        lines.append([arm, _STOPS[stop] + at, against, str(len(pairs)), f"{flops:.3g}", *changes])
    return markdown_table(["arm", "stops", "against", "seeds", "FLOPs", *_MEASURES], lines)


def _by_age(pairs: Sequence[tuple[Row, Row]], rows: Sequence[Row]) -> str:
    """Table over checkpoints; pairs: of aligned and plain runs."""
    lines, steps = [], _steps(rows)
    for place, step in enumerate(steps):
        here = [row for row in rows if int(row["step"]) == step and row["bin"] == "all"]
        gradients = [_text(_numbers(here, name), 3) for name in ("cosine", "share")]
        scales = [f"{_scale(here, loss):.0f}" for loss in ("flow", "align")]
        lines.append([str(step), *gradients, *scales, _text([_change_at(*pair, place) for pair in pairs], 1, "%")])
    early = max(len(steps) // 3, 1) - 1
    faded = _text([_change_at(*pair, -1) - _change_at(*pair, early) for pair in pairs], 1, "points")
    header = ["step", "cosine", "product / flow's squared norm", "B of the flow", "B of the alignment", "held-out loss, to plain"]
    return markdown_table(header, lines) + f"Change to plain at step {steps[-1]} less at step {steps[early]}: {faded}.\n\n"


def _by_bin(rows: Sequence[Row]) -> str:
    steps = _steps(rows)
    ends = steps[0], steps[-1]
    lines = []
    for place in _places(rows):
        first, last = ([row for row in rows if row["bin"] == place and int(row["step"]) == step] for step in ends)
        intervals = [_text(_numbers(each, name), 3) for name in ("cosine", "log_ratio") for each in (first, last)]
        sizes = [f"{np.mean(_numbers(last, name)):.3g}" for name in ("flow", "flow_noise", "align", "align_noise")]
        lines.append([f"{float(first[0]['t_low']):.2f} to {float(first[0]['t_high']):.2f}", *intervals, *sizes])
    names = [f"{name}, step {step}" for name in ("cosine", "ln of B, both over the flow's") for step in ends]
    header = ["t", *names, *(f"{name}, step {steps[-1]}" for name in ("flow's |G|²", "tr Σ", "alignment's |G|²", "tr Σ"))]
    noisy, change, orders = [], [], []
    for seed in dict.fromkeys(row["seed"] for row in rows):
        first, last = ([row for row in rows if row["seed"] == seed and int(row["step"]) == step] for step in ends)
        noisy.append(float(np.mean([float(row["log_ratio"]) for row in first[-3:-1]])))
        change.append(float(last[-1]["cosine"]) - float(first[-1]["cosine"]))
        t, cosines = (np.array([float(row[name]) for row in last[:-1]]) for name in ("t_low", "cosine"))
        orders.append(float(spearman(t, cosines, np.ones(len(t)))))
    text = f"ln of B, both over the flow's, two noisiest bins, step {ends[0]}: {_text(noisy, 3)}. Cosine of the whole range, "
    text += f"change to step {ends[1]}: {_text(change, 3)}; rank correlation of t and cosine there: {_text(orders, 2)}.\n\n"
    return markdown_table(header, lines) + text


def _draw(rows: Sequence[Row], path: Path) -> str:
    """Draw a row of panels per arm: cosine, noise scales and their ratio over training, a line per bin."""
    arms, places, steps = list(dict.fromkeys(row["arm"] for row in rows)), _places(rows), _steps(rows)
    colours = [*ordered_colours(len(places) - 1), "black"]
    figure, panels = new_figure("Gradients of flow and alignment", len(arms), 3, (14, 3.6 * len(arms) + 0.6), sharex=True)
    for line, arm in zip(panels, arms, strict=True):
        for place, color in zip(places, colours, strict=True):
            of_bin = [row for row in rows if row["arm"] == arm and row["bin"] == place]
            by_step = [[row for row in of_bin if int(row["step"]) == step] for step in steps]
            label = "whole range" if place == "all" else f"t {float(of_bin[0]['t_low']):.2f} to {float(of_bin[0]['t_high']):.2f}"
            for panel, name in ((line[0], "cosine"), (line[2], "log_ratio")):
                found = [mean_interval(_numbers(each, name)) for each in by_step]
                bars = np.array([error_bar(one) for one in found]).T if place == "all" else None
                panel.errorbar(steps, [one.value for one in found], yerr=bars, color=color, marker="o", markersize=3, label=label)
            line[1].plot(steps, [_scale(each, "flow") for each in by_step], color=color, marker="o", markersize=3)
            line[1].plot(steps, [_scale(each, "align") for each in by_step], color=color, linestyle=":")
        line[1].set_yscale("log")
        names = f"{arm}\ncosine of the mean gradients", "B of the flow\n(dotted: alignment)", "ln of B, both over the flow's"
        for panel, name in zip(line, names, strict=True):
            panel.set_ylabel(name)
            panel.set_xlabel("step")
        legend_outside(line[2], entries_of=line[0])
    note(figure, "means over seeds, of the whole range with 95 % intervals; B: ratio of means over seeds; shared parameters")
    return save(figure, path)


def _pairs(found: Found, mine: tuple[str, str], other: tuple[str, str]) -> list[tuple[Row, Row]]:
    """Rows of two kinds of run (arm, stop), paired by seed."""
    return [
        (row, found[other[0], seed, other[1]])
        for (arm, seed, stop), row in found.items() if (arm, stop) == mine and (other[0], seed, other[1]) in found
    ]  # fmt: skip


def _change_at(row: Row, plain: Row, place: int) -> float:
    """Change of the held-out loss at a checkpoint, in per cent."""
    mine, other = (list(json.loads(each["losses"]).values())[place] for each in (row, plain))
    return float(100 * (mine / other - 1))


def _steps(rows: Sequence[Row]) -> list[int]:
    return sorted({int(row["step"]) for row in rows})


def _places(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["bin"] for row in rows))


def _numbers(rows: Sequence[Row], name: str) -> list[float]:
    """Values that are defined: a cosine or ratio is not where a squared norm is estimated as negative."""
    return [value for row in rows if math.isfinite(value := float(row[name]))]


def _scale(rows: Sequence[Row], loss: str) -> float:
    signal = np.mean(_numbers(rows, loss))
    return float(np.mean(_numbers(rows, f"{loss}_noise")) / signal) if signal > 0 else math.nan


def _text(values: Sequence[float], digits: int, unit: str = "") -> str:
    if not values:
        return "-"
    found = mean_interval(values)
    text = f"{found.value:+.{digits}f}" + f" {unit}" * bool(unit)
    if not found.bounded:
        return text
    text += f" [{found.lower:+.{digits}f}, {found.upper:+.{digits}f}]"
    return Markdown(f"**{text}**") if found.excludes(0.0) else text
