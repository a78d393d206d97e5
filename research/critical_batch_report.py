"""Report of a critical-batch measurement: the size, whole and per timestep bin, as tables and a picture."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import NullFormatter, NullLocator

from research.branch_measurement import START, Measurement
from research.branch_training import has_phases
from research.cells import Row
from research.critical_batch_decision import (
    SHARE,
    BinTest,
    CriticalBatch,
    Excess,
    Losses,
    bin_test,
    critical_batch,
    excesses,
    progress,
    ratio_to_estimate,
)
from research.frame import number
from research.pictures import legend_outside, save
from torchtitan.gns.config import bin_edges, of_bins
from torchtitan.gns.step_sums import GEOMETRIES
from torchtitan.pictures.colours import COLOURS
from torchtitan.pictures.markdown import inline, markdown_table
from torchtitan.pictures.number_text import counted
from torchtitan.pictures.style import new_figure, note, ordered_colours
from torchtitan.statistics.interval import Interval
from torchtitan.training.metric_points import iter_points
from torchtitan.training.metrics import METRICS_FILE

WEIGHTS = {"ema/": "weights averaged over the branch", "": "trained weights"}
DECIDING = "ema/"  # the last step's noise does not decide
WHOLE = "loss"


@dataclass(frozen=True)
class Finding:
    """Finding from the losses of one column; `learned` as in `progress`."""

    found: list[Excess]
    critical: CriticalBatch
    learned: float


@dataclass(frozen=True)
class NoiseScale:
    """Noise scale of the run itself at a step; NaN and infinite where the signal is not significant."""

    geometry: str
    step: int
    samples: Interval


def report(asked: Measurement, rows: list[Row]) -> Path:
    """Write critical_batch.png and summary.md; return the latter."""
    columns = [WHOLE, *(f"loss_by_bin/{k}" for k in range(asked.config.metrics.loss_bins))]
    findings = {weights + column: finding(asked, rows, weights + column) for weights in WEIGHTS for column in columns}
    scales = noise_scales(asked.run / METRICS_FILE, asked.step)
    by_bin = bin_findings(asked, rows)
    picture = _draw(asked, findings, scales)
    summary = asked.folder / "summary.md"
    summary.write_text(_text(asked, rows, findings, scales, picture, by_bin), encoding="utf-8")
    return summary


def finding(asked: Measurement, rows: list[Row], column: str) -> Finding:
    """Compare the branches by one column of their rows."""
    losses, start = _losses(asked, rows, column)
    found = excesses(losses, asked.batch_sizes)
    learned = progress(start, list(losses[asked.batch_sizes[0]].values()))
    return Finding(found, critical_batch(found, asked.options.tolerance, learned), learned)


def _losses(asked: Measurement, rows: list[Row], column: str) -> tuple[Losses, float]:
    """Losses of the branches by batch size and seed, and that of the checkpoint."""
    losses: dict[int, dict[int, float]] = {size: {} for size in asked.batch_sizes}
    for row in rows:
        if row["seed"] == START or row["status"] == "failed":
            continue
        loss = math.inf if row["status"] == "diverged" else number(row, column)
        if not math.isnan(loss):
            losses[int(row["batch_size"])][int(row["seed"])] = loss
    return losses, next((number(row, column) for row in rows if row["seed"] == START), math.nan)


@dataclass(frozen=True)
class BinFindings:
    """Findings of the bins: tests of all, and noise scales of the run by geometry and bin."""

    tests: list[BinTest]
    scales: dict[str, dict[int, Interval]]


def bin_findings(asked: Measurement, rows: list[Row]) -> BinFindings:
    """Compare what the branches learned in each bin with the noise scales that the run logged of the same bins.

    Noise scales of another number of bins than that of the losses, or without an upper end, are left out.
    """
    bins = range(asked.config.metrics.loss_bins)
    found = [_losses(asked, rows, f"{DECIDING}loss_by_bin/{k}") for k in bins]
    tests = [bin_test(k, losses, asked.batch_sizes, start) for k, (losses, start) in zip(bins, found, strict=True)]
    gns = asked.config.gns
    scales: dict[str, dict[int, Interval]] = {}
    if gns.enable and not gns.bin_edges and gns.num_bins == len(bins):
        edges = bin_edges(gns, asked.config.objective).tolist()
        for k in bins:
            for scale in noise_scales(asked.run / METRICS_FILE, asked.step, str(k), edges):
                scales.setdefault(scale.geometry, {})[k] = scale.samples
    return BinFindings(tests, scales)


def noise_scales(
    metrics: Path, step: int, part: str = "all", edges: Sequence[float] | None = None
) -> list[NoiseScale]:
    """Noise scales last logged by a run when its checkpoint was written, by geometry: the sketch's, else the ranks' gradients'.

    Args:
        metrics: its metrics.jsonl.
        step: of the checkpoint.
        part: all, or the number of a bin.
        edges: inner edges of the bins that count, in t; None: any.
    """
    latest: dict[str, dict[str, NoiseScale]] = {"sketch": {}, "ranks": {}}
    try:
        for point in iter_points(metrics, '"gns/'):
            if point["step"] > step or not (edges is None or of_bins(point, edges)):
                continue
            for estimator, geometry in product(latest, GEOMETRIES):
                prefix = f"gns/{geometry}/{estimator}/{part}"
                if f"{prefix}/lower" in point:
                    upper = point.get(f"{prefix}/upper", math.inf)  # an infinite one is not logged, and the value means nothing
                    value = point.get(f"{prefix}/b_simple", math.nan) if math.isfinite(upper) else math.nan
                    of = geometry if estimator == "sketch" else f"{geometry}, of ranks"
                    latest[estimator][geometry] = NoiseScale(of, point["step"], Interval(value, point[f"{prefix}/lower"], upper))
    except OSError:
        return []
    return list((latest["sketch"] or latest["ranks"]).values())


# ---------------------------------------------------------------------- words


def critical_text(finding: Finding) -> str:
    """Critical batch size in words."""
    critical = finding.critical
    if critical.relation == "unknown":
        return "unknown: no branch of the smallest batch, or no other branch"
    if critical.relation == "unresolved":
        return f"no answer: branches learned {100 * finding.learned:.2g} %, no more than the tolerance"
    return str(critical.value) if critical.relation == "equal" else f"{critical.relation} {critical.value}"


def interval_text(critical: CriticalBatch) -> str:
    """Interval over seeds in words; a range is from the one batch size to, excluded, the other."""
    if critical.value is None:
        return ""
    if critical.lower is None:
        return "undecided" if critical.upper is None else f"below {critical.upper}"
    return f"at least {critical.lower}" if critical.upper is None else f"[{critical.lower}, {critical.upper})"


def _excess_text(excess: Excess, tolerance: float) -> str:
    if not excess.known:
        return "missing"
    if excess.mean.value == math.inf:
        return "diverged: beyond"
    margin = f" ± {100 * excess.mean.half_width:.2f}" if excess.mean.bounded else ""
    return f"{100 * excess.mean.value:+.2f}{margin}, {excess.verdict(tolerance)}"


def _text(
    asked: Measurement, rows: list[Row], findings: dict[str, Finding], scales: list[NoiseScale], picture: str, by_bin: BinFindings
) -> str:
    whole, options = findings[DECIDING + WHOLE], asked.options
    text = f"# Critical batch size of {inline(asked.run.resolve().name)} at step {asked.step}\n\n"
    text += f"**{critical_text(whole)}**"
    if words := interval_text(whole.critical):
        text += f" samples; 95 % over {counted(asked.seeds, 'seed')}: {words}"
    text += ".\n\n" + picture
    if whole.critical.larger:
        text += f"Batch {whole.critical.larger} is within the tolerance again: chance, or a rough landscape.\n\n"
    text += "## Held-out loss above the smallest batch's, in %\n\n"
    text += markdown_table(
        ["batch", "factor", "steps", "learning rate", *WEIGHTS.values()],
        (
            [str(plan.batch_size), f"{plan.factor:g}", str(plan.steps), f"{plan.lr:.3g}"]
            + [_excess_text(findings[weights + WHOLE].found[place], options.tolerance) for weights in WEIGHTS]
            for place, plan in enumerate(asked.plans)
        ),
    )
    text += (
        f"At {asked.samples} samples of every branch, {counted(asked.seeds, 'seed')}, paired by seed; ± is half of a 95 % "
        f"interval by Student's t, each by itself. Within: the interval ends at or below the tolerance of "
        f"{100 * options.tolerance:g} %; beyond: it begins above it. The critical batch size is the largest up to "
        "which every mean is within the tolerance; its interval is from the largest batch up to which all are within, "
        "to the first that is beyond, itself excluded. Only the batch sizes listed were tried, and the smallest is "
        "what others are compared with: whether it is itself too large, this measurement cannot say.\n\n"
    )
    text += _learned_text(asked, findings) + _scales_text(whole.critical, scales)
    text += "## By timestep bin\n\n" + _bins_table(asked, findings)
    text += "Bins of equal training mass, from clean to noise; a bin's loss is its plain error.\n\n"
    text += _learned_bins_text(asked, by_bin) + _method(asked)
    return text + _without_answer(rows)


def _learned_text(asked: Measurement, findings: dict[str, Finding]) -> str:
    learned = {words: findings[weights + WHOLE].learned for weights, words in WEIGHTS.items()}
    parts = [f"{100 * share:.2f} % ({words})" for words, share in learned.items()]
    return (
        f"The untouched checkpoint's loss is above the smallest batch's by {' and '.join(parts)}: what there was to "
        "lose. Where that is no more than the tolerance, any batch size would pass, and there is no answer (a "
        "smaller --tolerance; or, with another --output, a higher --lr or more --samples). Averaged weights are compared "
        "with the best that the checkpoint holds, averages included.\n\n"
    )


def _scales_text(critical: CriticalBatch, scales: list[NoiseScale]) -> str:
    text = "## The run's own estimates\n\n"
    if not scales:
        return text + "None: the run did not measure its gradient noise scale up to this step (gns.enable).\n\n"
    table = []
    for scale in scales:
        found = scale.samples
        ratio, words = ratio_to_estimate(critical, found), ""
        if ratio:
            sign = {"equal": "", "at least": "≥ ", "below": "< "}[critical.relation]
            upper = f"{ratio.upper:.2g}" if ratio.bounded else "∞"
            words = f"{sign}{ratio.value:.2g} [{ratio.lower:.2g}, {upper})"
        table.append([scale.geometry, str(scale.step), _scale_text(found), words])
    header = ["geometry", "logged at step", "gradient noise scale (samples), 95 %", "critical batch size / estimate"]
    return text + markdown_table(header, table) + "The ratio's interval takes both intervals at their worst.\n\n"


def _bins_table(asked: Measurement, findings: dict[str, Finding]) -> str:
    table = []
    for k in range(asked.config.metrics.loss_bins):
        of_bin = findings[f"{DECIDING}loss_by_bin/{k}"]
        cells = [_excess_text(excess, asked.options.tolerance) for excess in of_bin.found[1:]]
        learned = f"{100 * of_bin.learned:.2f}"
        table.append([str(k), critical_text(of_bin), interval_text(of_bin.critical), learned, *cells])
    sizes = [f"{size}: above {asked.batch_sizes[0]} (%)" for size in asked.batch_sizes[1:]]
    return markdown_table(["bin", "critical batch size", "95 %", "learned (%)", *sizes], table)


def _learned_bins_text(asked: Measurement, by_bin: BinFindings) -> str:
    sizes, geometries = asked.batch_sizes, list(by_bin.scales)
    table = []
    for test in by_bin.tests:
        cells = [_share_text(share) for share in test.shares[1:]]
        nothing = "no significant decrease" if test.learned.bounded else "unknown: fewer than two whole seeds"
        cells = cells or [nothing] + [""] * (len(sizes) - 2)
        noise = [_scale_text(by_bin.scales[geometry].get(test.place)) for geometry in geometries]
        table.append([str(test.place), *noise, _batch_text(test.batch_size, sizes), *cells])
    header = ["bin", *(f"noise scale, {geometry}" for geometry in geometries), f"batch at {100 * SHARE:.0f} %"]
    header += [f"{size}: of what was learned (%)" for size in sizes[1:]]
    return (
        "## By timestep bin, of what it learned\n\n"
        f"Excess loss over batch {sizes[0]}, divided by the decrease of the bin's loss in its branches; ± half of a 95 % "
        f"interval over seeds. Then the batch size at which this share reaches {100 * SHARE:.0f} %. Bins without a significant "
        "decrease have no share.\n\n"
    ) + markdown_table(header, table)


def _share_text(share: Interval) -> str:
    return f"{100 * share.value:+.0f} ± {100 * share.half_width:.0f}" if math.isfinite(share.value) else "diverged"


def _scale_text(scale: Interval | None) -> str:
    if scale is None:
        return ""
    if not scale.bounded:
        return f"above {scale.lower:.3g}" if scale.lower > 0 else "unknown"
    return f"{scale.value:.3g} [{scale.lower:.3g}, {scale.upper:.3g}]"


def _batch_text(batch_size: float, sizes: list[int]) -> str:
    if math.isnan(batch_size):
        return ""
    return f"{batch_size:.3g}" if math.isfinite(batch_size) else f"above {sizes[-1]}"


def _method(asked: Measurement) -> str:
    options, allocated = asked.options, asked.config.gns.enable and asked.config.gns.allocate_timesteps
    text = (
        "## How\n\n"
        f"Branches from checkpoint {asked.checkpoint.name} (batch {asked.config.training.global_batch_size}) with its "
        f"weights and optimizer state; learning rate {options.lr:.3g} at factor 1, rule {options.lr_rule}, "
        f"constant over the branch, no warm-up; {counted(options.nproc, 'process', 'es')}, the run's microbatch, "
        "accumulation for the rest. A branch's seed draws the order of images, timesteps and noise, none of them the "
        "run's own; the same seed reads the same samples at every batch size. Losses are on the same held-out (image, "
        f"timestep, noise) triples, {options.held_out} or a few more, so the intervals are of training, not of the choice of "
        "held-out images. Averaged weights: a power-function average of relative width 0.1, of the branch alone.\n\n"
    )
    if has_phases(asked.config):
        text += "Routing and alignment act throughout the branches, or not at all, as they did at the checkpoint.\n\n"
    if allocated:
        text += "The run allocated its timesteps by measured noise; branches draw them from the training density.\n\n"
    return text


def _without_answer(rows: list[Row]) -> str:
    failed = [[row["batch_size"], row["seed"], row["status"], row["reason"]] for row in rows if row["status"] != "ok"]
    if not failed:
        return ""
    note = "A batch size with a diverged branch counts as beyond the tolerance; a failed branch is left out.\n\n"
    return "## Branches without a loss\n\n" + note + markdown_table(["batch", "seed", "status", "reason"], failed)


# ---------------------------------------------------------------------- picture


def _draw(asked: Measurement, findings: dict[str, Finding], scales: list[NoiseScale]) -> str:
    whole = findings[DECIDING + WHOLE]
    title = f"Critical batch size of {asked.run.resolve().name} at step {asked.step}: {critical_text(whole)}"
    if words := interval_text(whole.critical):
        title += f" (95 %: {words})"
    figure, axes = new_figure(title, 1, 2, (13, 5.2))
    left, right = axes[0]
    for weights, color, shift in ((DECIDING, COLOURS[1], 1.0), ("", "0.6", 1.06)):
        _draw_excess(left, findings[weights + WHOLE].found, color, WEIGHTS[weights], shift, bars=True)
    for scale, color in zip(scales, (COLOURS[0], COLOURS[2]), strict=False):
        if scale.samples.bounded:
            low, high = _limits(asked)
            side = "left" if scale.samples.value < low else "right" if scale.samples.value > high else ""
            label = f"noise scale, {scale.geometry}: {scale.samples.value:.3g}" + (f" ({side} of the axis)" if side else "")
            left.axvline(scale.samples.value, color=color, linewidth=1, linestyle=":", label=label)
            left.axvspan(scale.samples.lower, scale.samples.upper, color=color, alpha=0.1, linewidth=0)
    bins = asked.config.metrics.loss_bins
    for k, color in enumerate(ordered_colours(bins)):
        of_bin = findings[f"{DECIDING}loss_by_bin/{k}"].found
        _draw_excess(right, of_bin, color, f"bin {k}", 1.0 + 0.01 * (k - 0.5 * (bins - 1)), bars=bins <= 5)
    for axis, words in ((left, "all timesteps"), (right, "by timestep bin, weights averaged over the branch")):
        _finish(axis, asked, words)
    legend_outside(right, "clean to noise")
    left.legend(fontsize=8, loc="best")
    bars = "bars: 95 % intervals over seeds" if asked.seeds > 1 else "one seed: no intervals"
    note(figure, f"{asked.samples} samples of every branch, {counted(asked.seeds, 'seed')}, paired; {bars}; dots: seeds")
    return save(figure, asked.folder / "critical_batch.png")


def _draw_excess(axis: Axes, found: list[Excess], color, label: str, shift: float, bars: bool) -> None:
    drawn = [excess for excess in found if excess.known and math.isfinite(excess.mean.value)]
    xs, means = [shift * excess.batch_size for excess in drawn], [100 * excess.mean.value for excess in drawn]
    axis.plot(xs, means, color=color, marker="o", markersize=4, linewidth=1.5, label=label)
    for x, excess in zip(xs, drawn, strict=True):
        if bars:
            seeds = [100 * value for value in excess.by_seed]
            axis.plot([x] * len(seeds), seeds, ".", color=color, alpha=0.5)
        if bars and excess.mean.bounded:
            axis.vlines(x, 100 * excess.mean.lower, 100 * excess.mean.upper, color=color, linewidth=1.3)
    for excess in found:
        if excess.mean.value == math.inf:
            place: dict[str, Any] = {"transform": axis.get_xaxis_transform(), "rotation": 90, "ha": "center", "va": "top"}
            axis.text(excess.batch_size, 0.97, "diverged", fontsize=8, color=color, **place)


def _limits(asked: Measurement) -> tuple[float, float]:
    return asked.batch_sizes[0] / 1.3, asked.batch_sizes[-1] * 1.4


def _finish(axis: Axes, asked: Measurement, words: str) -> None:
    sizes = asked.batch_sizes
    axis.axhline(100 * asked.options.tolerance, color="black", linestyle="--", linewidth=1, label="tolerance")
    axis.axhline(0, color="0.7", linewidth=0.8)
    axis.set_xscale("log", base=2)
    axis.set_xlim(*_limits(asked))
    axis.set_xticks(sizes, [str(size) for size in sizes])
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.set_xlabel("global batch size (samples)")
    axis.set_ylabel(f"held-out loss above batch {sizes[0]}'s (%)")
    axis.set_title(words, fontsize=10)
