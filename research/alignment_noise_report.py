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
from torchtitan.statistics.interval import Interval, mean_interval

Row = Mapping[str, str]
Found = Mapping[tuple[str, int, str], Row]  # rows of runs by arm, seed and stop
_STOPS = {"": "never", "third": "after a third", "rule": "by rule"}
# Measure -> change of one row against another, its unit, and whether more is better.
_MEASURES: dict[str, tuple[Callable[[Row, Row], float], str]] = {
    "held-out flow loss": (lambda row, other: 100 * (_last_loss(row) / _last_loss(other) - 1), "%"),
    "recognised": (lambda row, other: 100 * (float(row["accuracy"]) - float(other["accuracy"])), "points"),
    "ln FD": (lambda row, other: math.log(float(row["fd"]) / float(other["fd"])), ""),
}


def write(found: Found, rows: Sequence[Row], arms: Sequence[str], seeds: int, folder: Path) -> str:
    """Draw the picture into the folder; return the text of the summary."""
    plain, *aligned = arms
    text = f"{len(found)} of {seeds * (1 + len(_STOPS) * len(aligned))} runs have ended; one by rule that never stopped, or at "
    text += "the fixed stop, counts as ended with its twin. Changes are paired by seed, with 95 % intervals by Student's t over "
    text += "seeds; bold: the interval excludes 0.\n\n"
    text += f"## Against {plain}\n\n" + _against_plain(found, plain, aligned)
    text += "## The rule against other stops\n\n" + _against_stops(found, aligned)
    for arm in aligned:
        if of_arm := [row for row in rows if row["arm"] == arm]:
            text += f"## {arm}, by age\n\n" + _by_age(found, of_arm, plain, arm)
            text += f"## {arm}, by timestep bin\n\n" + _by_bin(of_arm)
    return text + (_draw(rows, folder / "alignment_noise.png") if rows else "")


def _against_plain(found: Found, plain: str, aligned: Sequence[str]) -> str:
    reference = {seed: row for (arm, seed, _), row in found.items() if arm == plain}
    lines = []
    for arm in aligned:
        for stop, words in _STOPS.items():
            mine = _of(found, arm, stop)
            pairs = [(row, reference[seed]) for seed, row in mine.items() if seed in reference]
            at = ", ".join(row["stop"] or "never" for row in mine.values()) if stop == "rule" else ""
            flops = [float(row["flops_per_image"]) / float(other["flops_per_image"]) for row, other in pairs]
            line = [arm, words + (f" ({at})" if at else ""), str(len(pairs)), f"{np.mean(flops):.3g}" if flops else "-"]
            lines.append(line + [_changes(pairs, measure) for measure in _MEASURES])
    return markdown_table(["arm", "alignment stops", "seeds", "FLOPs", *_MEASURES], lines)


def _against_stops(found: Found, aligned: Sequence[str]) -> str:
    lines = []
    for arm in aligned:
        mine = _of(found, arm, "rule")
        for stop in ("", "third"):
            others = _of(found, arm, stop)
            pairs = [(row, others[seed]) for seed, row in mine.items() if seed in others]
            lines.append([arm, _STOPS[stop], str(len(pairs)), *(_changes(pairs, measure) for measure in _MEASURES)])
    return markdown_table(["arm", "against a stop", "seeds", *_MEASURES], lines)


def _by_age(found: Found, rows: Sequence[Row], plain: str, arm: str) -> str:
    lines = []
    reference, mine = _of(found, plain, ""), _of(found, arm, "")
    for step in sorted({int(row["step"]) for row in rows}):
        here = [row for row in rows if int(row["step"]) == step and row["bin"] == "all"]
        losses = [
            [json.loads(runs[seed]["losses"])[str(step)] for runs in (mine, reference)] for seed in mine if seed in reference
        ]
        change = [100 * (ours / theirs - 1) for ours, theirs in losses]
        sizes = (_scale(here, "flow"), _scale(here, "align"))
        line = [str(step), *(_text(_numbers(here, name), 3) for name in ("cosine", "share")), *(f"{size:.0f}" for size in sizes)]
        lines.append([*line, _text(change, 1, "%") if change else "-"])
    header = ["step", "cosine", "product / flow's squared norm", "B of the flow", "B of the alignment", "held-out loss, to plain"]
    return markdown_table(header, lines)


def _by_bin(rows: Sequence[Row]) -> str:
    steps = sorted({int(row["step"]) for row in rows})
    lines = []
    for place in sorted({row["bin"] for row in rows}):
        of_bin = [row for row in rows if row["bin"] == place]
        first, last = ([row for row in of_bin if int(row["step"]) == step] for step in (steps[0], steps[-1]))
        where = f"{float(first[0]['t_low']):.2f} to {float(first[0]['t_high']):.2f}"
        ratio = (_text(_numbers(each, "log_ratio"), 3) for each in (first, last))
        found = (_text(_numbers(each, "cosine"), 3) for each in (first, last))
        lines.append([where, *found, *ratio])
    names = ("cosine", "ln of B, both over the flow's")
    table = markdown_table(["t", *(f"{name}, step {step}" for name in names for step in (steps[0], steps[-1]))], lines)
    whole = [row for row in rows if row["bin"] == "all"]
    change, orders, noisy = [], [], []
    for seed in sorted({row["seed"] for row in rows}):
        cosine = {int(row["step"]): float(row["cosine"]) for row in whole if row["seed"] == seed}
        change.append(cosine[steps[-1]] - cosine[steps[0]])
        mine = [row for row in rows if row["seed"] == seed and row["bin"] != "all"]
        of_last = [row for row in mine if int(row["step"]) == steps[-1]]
        t, cosines = (np.array([float(row[name]) for row in of_last]) for name in ("t_low", "cosine"))
        orders.append(float(spearman(t, cosines, np.ones(len(t)))))
        noisiest = sorted({float(row["t_low"]) for row in mine})[-2:]
        of_first = [row for row in mine if int(row["step"]) == steps[0] and float(row["t_low"]) in noisiest]
        noisy.append(float(np.mean([float(row["log_ratio"]) for row in of_first])))
    text = f"ln of B, both over the flow's, two noisiest bins, step {steps[0]}: {_text(noisy, 3)}. Cosine of the whole range, "
    text += f"change to step {steps[-1]}: {_text(change, 3)}; rank correlation of t and cosine there: {_text(orders, 2)}.\n\n"
    return table + text


def _draw(rows: Sequence[Row], path: Path) -> str:
    """Draw a row of panels per arm: cosine, noise scales and their ratio over training, a line per bin."""
    arms = list(dict.fromkeys(row["arm"] for row in rows))
    places = sorted({row["bin"] for row in rows})
    colours = [*ordered_colours(len(places) - 1), "black"]
    figure, panels = new_figure("Gradients of flow and alignment", len(arms), 3, (14, 3.6 * len(arms) + 0.6), sharex=True)
    for line, arm in zip(panels, arms, strict=True):
        for place, color in zip(places, colours, strict=True):
            of_bin = [row for row in rows if row["arm"] == arm and row["bin"] == place]
            steps = sorted({int(row["step"]) for row in of_bin})
            by_step = [[row for row in of_bin if int(row["step"]) == step] for step in steps]
            label = "whole range" if place == "all" else f"t {float(of_bin[0]['t_low']):.2f} to {float(of_bin[0]['t_high']):.2f}"
            for panel, name in ((line[0], "cosine"), (line[2], "log_ratio")):
                found = [mean_interval(_numbers(each, name)) for each in by_step]
                bars = np.array([error_bar(one) for one in found]).T
                panel.errorbar(steps, [one.value for one in found], yerr=bars, color=color, marker="o", markersize=3, label=label)
            line[1].plot(steps, [_scale(each, "flow") for each in by_step], color=color, marker="o", markersize=3)
            line[1].plot(steps, [_scale(each, "align") for each in by_step], color=color, linestyle=":")
        line[0].set_title(arm, fontsize=10)
        line[0].set_ylabel("cosine of the mean gradients")
        line[1].set_ylabel("noise scale B\n(dotted: the alignment's)")
        line[1].set_yscale("log")
        line[2].set_ylabel("ln of B, both over the flow's")
        for panel in (line[0], line[2]):
            panel.axhline(0, color="black", linewidth=0.8)
        legend_outside(line[2], entries_of=line[0])
    for panel in panels[-1]:
        panel.set_xlabel("step")
    note(figure, "means over seeds with 95 % intervals; B: ratio of the means over seeds; over the parameters that both reach")
    return save(figure, path)


def _of(found: Found, arm: str, stop: str) -> dict[int, Row]:
    return {seed: row for (name, seed, end), row in found.items() if (name, end) == (arm, stop)}


def _last_loss(row: Row) -> float:
    return list(json.loads(row["losses"]).values())[-1]


def _numbers(rows: Sequence[Row], name: str) -> list[float]:
    """Values that are defined: a cosine or ratio is not where a squared norm is estimated as negative."""
    return [value for row in rows if math.isfinite(value := float(row[name]))]


def _scale(rows: Sequence[Row], loss: str) -> float:
    signal = np.mean(_numbers(rows, loss))
    return float(np.mean(_numbers(rows, f"{loss}_noise")) / signal) if signal > 0 else math.nan


def _changes(pairs: Sequence[tuple[Row, Row]], measure: str) -> str:
    change, unit = _MEASURES[measure]
    return _text([change(*pair) for pair in pairs], 2 if not unit else 1, unit) if pairs else "-"


def _text(values: Sequence[float], digits: int, unit: str = "") -> str:
    found: Interval = mean_interval(values)
    text = f"{found.value:+.{digits}f}" + f" {unit}" * bool(unit)
    if not found.bounded:
        return text
    text += f" [{found.lower:+.{digits}f}, {found.upper:+.{digits}f}]"
    return Markdown(f"**{text}**") if found.excludes(0.0) else text
