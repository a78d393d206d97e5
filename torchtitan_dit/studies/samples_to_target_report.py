"""Report of samples to targets from the records alone: best rates, E(B), B_c beside B, decision and picture.

    scripts/study.py samples_to_target_report FOLDER...
"""

import argparse
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, LogLocator, NullFormatter, NullLocator

from torchtitan.pictures.colours import COLOURS
from torchtitan.pictures.markdown import markdown_table
from torchtitan.pictures.number_text import counted
from torchtitan.pictures.style import error_bar, legend_outside, new_figure, note, ordered_colours, save
from torchtitan.statistics.interval import Interval, mean_interval
from torchtitan_dit.studies.records import write_report
from torchtitan_dit.studies.samples_to_target_statistics import (
    AGES,
    GEOMETRIES,
    LEAST_RANK,
    RATIO,
    StudyRecord,
    TargetResult,
    Tuned,
    agreements,
    part_of,
    ratio,
    read_study,
    target_result,
)

NAME = "samples_to_target"
_AGE = next(iter(AGES))  # of the comparison


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("records", metavar="FOLDER", type=Path, nargs="+", help="folder of a study samples_to_target, or a copy of its records")
    add("--output", type=Path, default=Path("outputs/studies/samples_to_target_report"),
        help="folder of the results (default: outputs/studies/samples_to_target_report)")


def run_alone(arguments: argparse.Namespace) -> Path:
    """Read the records, write pictures and summary.md; return the latter. Raises StudyError."""
    studies = [read_study(path) for path in arguments.records]
    return write_report(arguments.output, NAME, lambda folder: studies_text(studies, folder))


def studies_text(studies: Sequence[StudyRecord], folder: Path) -> str:
    """Text of the report on some studies; draws their pictures into the folder."""
    return "".join(_study_text(record, number, folder) for number, record in enumerate(studies))


def _study_text(record: StudyRecord, number: int, folder: Path) -> str:
    results = {target: target_result(record, target) for target in record.targets}
    picture = folder / f"samples_to_target_{number}.png"
    text = f"## {record.name}\n\n{_described(record)}"
    text += _best_rates(record, results) + _critical(results) + _verdict(record, results)
    if any(found.seeds for result in results.values() for found in result.tuned.values()):
        draw_picture(record, results, picture)
        text += f"![Samples to a target, and B_c beside B]({picture.name})\n\n"
    return text


def _described(record: StudyRecord) -> str:
    settings, rows = record.settings, record.rows
    ended = [row for row in rows if row["status"] == "ok"]
    machines = ", ".join(dict.fromkeys(row["machine"] for row in ended))
    commits = ", ".join(dict.fromkeys(row["commit"] for row in ended))
    factors, batches = ", ".join(f"{factor:g}" for factor in settings["factors"]), ", ".join(map(str, settings["batches"]))
    text = (
        f"{settings['flavor']}, batch sizes {batches}, {counted(settings['seeds'], 'seed')}; "
        f"learning rates {factors} x {settings['lr']:g}, "
        f"by the rule {settings['rule']} from batch {settings['batch']}. {counted(len(rows), 'run')}, "
        f"{record.missing} of the planned ones missing. {machines}; commit {commits}.\n\n"
    )
    if failed := [row for row in rows if row["status"] not in ("ok", "diverged")]:
        text += markdown_table(["run", "no answer"], ([row["run"], row["reason"]] for row in failed))
    if early := [row["run"] for row in ended if row["at_most"]]:
        text += f"Below a target at the first validation, whose samples are an upper end: {', '.join(early)}.\n\n"
    return text


# ---------------------------------------------------------------------- tables


def _best_rates(record: StudyRecord, results: Mapping[str, TargetResult]) -> str:
    lines = [
        [target, str(batch), *_tuned_cells(record, batch, found)]
        for target, result in results.items() for batch, found in result.tuned.items()
    ]  # fmt: skip
    header = ["target", "batch", "best learning rate", "samples", "steps"]
    text = (
        "Best learning rates, by interpolation in ln lr; samples with 95 % intervals over seeds. A best rate at the "
        "edge is given as a multiple of the rule's.\n\n"
    )
    return text + markdown_table(header, lines)


def _tuned_cells(record: StudyRecord, batch: int, found: Tuned) -> list[str]:
    if found.best is None:
        return [f"none: {found.reason}", "", ""]
    samples = mean_interval(found.seeds)
    how = "" if found.best.interpolated else " (of the grid: a neighbour does not reach the target)"
    return [f"{record.rate(batch, found.best.lr):.3g}{how}", _interval(samples, 4), f"{samples.value / batch:.4g}"]


def _critical(results: Mapping[str, TargetResult]) -> str:
    header = ["target", "E_min", "B_c", "p of the hyperbola"]
    header += [f"B {geometry}, {age}" for geometry in GEOMETRIES for age in AGES]
    header += [f"B_c / B {geometry}" for geometry in GEOMETRIES]
    lines = []
    for target, found in results.items():
        if found.fit is None:
            cells = [f"no fit: {found.reason}", "", ""]
        else:
            word = ", rejected" if found.fit.rejected() else ""
            cells = [_interval(found.fit.least, 4), _interval(found.fit.critical), f"{found.fit.p_value:.2g}{word}"]
        cells += [_interval(found.noise[geometry, age]) for geometry in GEOMETRIES for age in AGES]
        cells += [_interval(ratio(found.critical, found.noise[geometry, _AGE])) for geometry in GEOMETRIES]
        lines.append([target, *cells])
    ages = "at half of a run's own samples to the target, and at the target"
    return f"E(B) = E_min (1 + B / B_c), and the noise scale B of the same bin, {ages}.\n\n" + markdown_table(header, lines)


def _interval(found: Interval, digits: int = 3) -> str:
    """Format an estimate with its interval; more than its lower end where it has no upper one."""
    if math.isnan(found.value) or math.isinf(found.value):
        return f"> {found.lower:.{digits}g}" if found.lower > 0 and math.isfinite(found.lower) else "unknown"
    return f"{found.value:.{digits}g} [{found.lower:.{digits}g}, {found.upper:.{digits}g}]"


# ---------------------------------------------------------------------- decision


def _verdict(record: StudyRecord, results: Mapping[str, TargetResult]) -> str:
    lines = [
        [found.geometry, str(found.bins), _interval(found.rank) if found.bins >= 3 else "unknown", rank_verdict(found.rank)]
        for found in agreements(record, results)
    ]  # fmt: skip
    whole = next((found for target, found in results.items() if part_of(target.partition(" ")[0]) == "all"), None)
    header = ["geometry", "bins", "rank correlation of B_c with B", "verdict"]
    if record.missing:
        text = f"Interim: {record.missing} planned runs are missing, which decides nothing.\n\n"
        return text + markdown_table(header[:3], [line[:3] for line in lines])
    text = "Over bins, at half of the samples:\n\n" + markdown_table(header, lines)
    if whole is None:
        return text
    if whole.critical is None:
        reason = "the hyperbola is rejected" if whole.fit else whole.reason
        return text + f"Of the whole loss there is no B_c: {reason}.\n\n"
    words = "; ".join(
        f"B {geometry}: {ratio_verdict(ratio(whole.critical, whole.noise[geometry, _AGE]))}" for geometry in GEOMETRIES
    )
    return text + f"Of the whole loss: {words}.\n\n"


def ratio_verdict(found: Interval) -> str:
    """Verdict on B as a prediction of B_c, by the criteria of docs/critical_batch.md."""
    if math.isnan(found.value):
        return "undecided"
    if 1 / RATIO <= found.lower and found.upper <= RATIO:
        return f"predicts B_c within a factor of {RATIO:g}"
    return "refuted" if found.upper < 1 / RATIO or found.lower > RATIO else "undecided"


def rank_verdict(found: Interval) -> str:
    """Verdict on the ranks of the bins, by the criteria of docs/critical_batch.md."""
    if math.isnan(found.value):
        return "undecided"
    return "ranks the bins" if found.lower >= LEAST_RANK else "refuted" if found.upper < LEAST_RANK else "undecided"


# ---------------------------------------------------------------------- picture


def draw_picture(record: StudyRecord, results: Mapping[str, TargetResult], path: Path) -> None:
    """Draw E(B) of every target with its hyperbola, and B_c beside B in both geometries."""
    figure, axes = new_figure(f"Samples to a target, and the noise scale: {record.name}", 1, 2, (10, 4.8))
    samples, scales = axes[0]
    colours = _colours(list(results))
    for target, found in results.items():
        _draw_samples(samples, target, found, colours[target])
    samples.set_ylabel("samples to the target, at the best learning rate")
    samples.set_xlabel("batch size")
    ends = [
        end for place, geometry in enumerate(GEOMETRIES)
        for end in _draw_scales(scales, results, geometry, COLOURS[place], "os"[place])
    ]  # fmt: skip
    panels = [samples]
    if ends:
        scales.plot([min(ends), max(ends)], [min(ends), max(ends)], "--", color="0.5", linewidth=0.8)
        scales.legend(fontsize=8, frameon=False)
        panels.append(scales)
    else:
        scales.text(0.5, 0.5, "no B_c with a noise scale beside it", ha="center", transform=scales.transAxes, fontsize=9)
        scales.set_xticks([])
        scales.set_yticks([])
    scales.set_xlabel("noise scale B at half of the samples")
    scales.set_ylabel("critical batch size B_c")
    for axis in (axis for panel in panels for axis in (panel.xaxis, panel.yaxis)):
        axis.axes.set(**{f"{axis.axis_name}scale": "log"})
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter(NullFormatter())
    samples.xaxis.set_major_locator(FixedLocator(record.settings["batches"]))
    samples.xaxis.set_minor_locator(NullLocator())
    legend_outside(samples)
    note(figure, "bars: 95 % intervals; lines: hyperbolas that are not rejected; filled: the whole loss; dashed: B_c = B")
    save(figure, path)


def _colours(targets: Sequence[str]) -> dict[str, Any]:
    """Black to grey for the whole loss, from dark to bright for the bins."""
    bins = [target for target in targets if part_of(target.partition(" ")[0]) != "all"]
    whole = [target for target in targets if target not in bins]
    greys = [f"{0.6 * place / max(len(whole) - 1, 1):.2f}" for place in range(len(whole))]
    return dict(zip(whole, greys, strict=True)) | dict(zip(bins, ordered_colours(len(bins)), strict=True))


def _draw_samples(panel: Axes, target: str, found: TargetResult, colour: Any) -> None:
    known = {batch: mean_interval(of.seeds) for batch, of in found.tuned.items() if of.seeds}
    loss, _, value = target.partition(" ")
    label = ("whole" if part_of(loss) == "all" else f"bin {part_of(loss)}") + f" {value}"
    bars = np.array([error_bar(each) for each in known.values()]).T if known else None
    panel.errorbar(list(known), [each.value for each in known.values()], bars, fmt="o", color=colour, markersize=4,
                   linewidth=0.8, label=label)  # fmt: skip
    if found.fit and found.critical:
        x = np.geomspace(min(known), max(known), 50)
        panel.plot(x, [found.fit(batch) for batch in x], color=colour, linewidth=1.0)


def _draw_scales(
    panel: Axes, results: Mapping[str, TargetResult], geometry: str, colour: str, symbol: str
) -> list[float]:
    """Draw B_c over B; return the values of both."""
    drawn: list[float] = []
    for target, found in results.items():
        noise, critical = found.noise[geometry, _AGE], found.critical
        if critical is None or not critical.bounded or not (noise.value > 0 and critical.value > 0):
            continue
        filled = colour if part_of(target.partition(" ")[0]) == "all" else "none"
        across, up = (np.array([error_bar(each)]).T for each in (noise, critical))
        panel.errorbar(noise.value, critical.value, up, across, fmt=symbol, color=colour, markerfacecolor=filled,
                       markersize=5, linewidth=0.7, label=None if drawn else geometry)  # fmt: skip
        drawn += [noise.value, critical.value]
    return drawn
