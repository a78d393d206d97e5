"""Pictures of a grid of trained runs: loss by timestep bin with its change against the reference; learning curves."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullFormatter

from research.grid_results import GridResults
from research.pictures import legend_outside, save
from research.slot_nodes import TimestepBin
from torchtitan.pictures.style import MARKERS, colour, label_log_axis, new_figure, note
from torchtitan.statistics.interval import Interval, mean_interval, paired_difference

_HOLLOW = "hollow: one seed alone, without an interval"
_WIDTH_OF_A_BIN = 0.7  # that the arms' bars share


def draw_bins(results: GridResults, group: str, bins: Sequence[TimestepBin], path: Path) -> str:
    """Draw the loss in every bin, and its change against the reference with 95 % intervals over seeds."""
    arms = results.labels(group)
    figure, axes = new_figure(f"Held-out loss by timestep, {group}", rows=2, size=(10.5, 7.5), sharex=True)
    absolute, relative = axes[:, 0]
    for number, arm in enumerate(arms):
        style = {"color": colour(number), "marker": MARKERS[number % len(MARKERS)], "markersize": 4}
        found = [mean_interval(list(results.of_bin(group, arm, place).values())) for place in range(len(bins))]
        _draw_line(absolute, range(len(bins)), found, label=results.legend(group, arm), linewidth=1.2, **style)
        if number:
            _draw_changes(relative, results, group, arm, len(bins), (number - 1, len(arms) - 1), style)
    finish_bins(absolute, relative, bins, results.parametrisation, arms[0])
    legend_outside(absolute, "settings")
    seeds = len(results.seeds)
    note(figure, f"bands and bars: 95 % intervals over {seeds} seeds; ratios are paired by seed; {_HOLLOW}")
    return save(figure, path)


def finish_bins(absolute: Axes, relative: Axes, bins: Sequence[TimestepBin], parametrisation: str, reference: str) -> None:
    """Set scales and labels of a panel of errors by bin, and of one of their ratios to a reference's."""
    absolute.set_yscale("log")
    label_log_axis(absolute.yaxis)
    absolute.set_ylabel(f"squared error of {parametrisation}")
    relative.set_yscale("log")
    relative.axhline(1.0, color="black", linewidth=1)
    _limit_ratios(relative)
    label_log_axis(relative.yaxis)
    relative.grid(axis="x", visible=False)  # lines between the bins instead
    for place in range(1, len(bins)):
        relative.axvline(place - 0.5, color="0.9", linewidth=0.8)
    relative.set_ylabel(f"ratio to the error\nof {reference}")
    relative.set_xticks(range(len(bins)), [where.label for where in bins], fontsize=8)
    relative.set_xlabel(f"timestep bin ({'DDPM indices' if bins[0].unit == 'index' else 't'}), from data to noise")


def draw_curves(results: GridResults, scores: Mapping[str, Callable], path: Path) -> str:
    """Draw the loss over the samples seen: a column per group, a row per average."""
    groups = results.groups
    size = (4.2 * len(groups) + 3.2, 3.4 * len(scores) + 0.8)
    figure, axes = new_figure("Held-out loss over the samples seen", len(scores), len(groups), size)
    for column, group in enumerate(groups):
        for row, (name, score) in enumerate(scores.items()):
            ax = axes[row, column]
            for number, arm in enumerate(results.labels(group)):
                _draw_curve(ax, results, group, arm, score, number)
            ax.set_xscale("log")
            ax.set_yscale("log")
            ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            ax.xaxis.set_major_formatter("{x:g}")
            ax.xaxis.set_minor_formatter(NullFormatter())
            label_log_axis(ax.yaxis)
            ax.set_title(f"{group}: {name}", fontsize=10)
            ax.set_xlabel("samples seen")
            if column == 0:
                ax.set_ylabel(f"squared error of {results.parametrisation}")
            if row == 0 and (column == len(groups) - 1 or len(results.labels(group)) > len(results.labels(groups[-1]))):
                legend_outside(ax, "settings")
    note(figure, f"bands: 95 % intervals over {len(results.seeds)} seeds; {_HOLLOW}")
    return save(figure, path)


def _draw_changes(
    axes, results: GridResults, group: str, arm: str, count: int, position: tuple[int, int], style: dict
) -> None:
    number, of = position
    shift = _WIDTH_OF_A_BIN * ((number + 0.5) / of - 0.5)
    reference = results.labels(group)[0]
    for place in range(count):
        found = paired_difference(results.of_bin(group, arm, place), results.of_bin(group, reference, place))
        if math.isnan(found.value):
            continue
        if found.bounded:
            low, high = math.exp(found.lower), math.exp(found.upper)
            axes.vlines(place + shift, low, high, color=style["color"], linewidth=1.4)
        fill = "full" if found.bounded else "none"
        axes.plot([place + shift], [math.exp(found.value)], linestyle="none", fillstyle=fill, **style)


def _draw_curve(axes, results: GridResults, group: str, arm: str, score: Callable, number: int) -> None:
    found = {n: mean_interval(list(results.scores(group, arm, score, n).values())) for n in results.samples}
    found = {n: mean for n, mean in found.items() if not math.isnan(mean.value)}
    _draw_line(
        axes, list(found), list(found.values()), label=results.legend(group, arm), color=colour(number),
        marker=MARKERS[number % len(MARKERS)], markersize=3.5, linewidth=1.3,
    )  # fmt: skip


def _draw_line(axes, places: Sequence[float], found: Sequence[Interval], *, label: str, **style) -> None:
    """Draw means of ln loss, as losses: a band where the interval is bounded, else hollow markers."""
    means = [math.exp(mean.value) for mean in found]
    known = [place for place, mean in enumerate(found) if mean.bounded]
    unknown = [place for place in range(len(found)) if place not in known]
    filled, every = ("full", known) if known else ("none", unknown)
    axes.plot(places, means, label=label, fillstyle=filled, markevery=every, **style)
    if known and unknown:
        axes.plot(places, means, fillstyle="none", markevery=unknown, **style | {"linewidth": 0})
    bands = [(mean.lower, mean.upper) if mean.bounded else (math.nan, math.nan) for mean in found]
    ends = [list(map(math.exp, end)) for end in zip(*bands, strict=True)] or [[], []]
    axes.fill_between(places, *ends, color=style["color"], alpha=0.12, linewidth=0)


def _limit_ratios(axes) -> None:
    """Limit the axis of ratios: ends of wide intervals may leave the picture, estimates may not."""
    estimates = [abs(math.log(y)) for line in axes.get_lines() for y in line.get_ydata()]
    low, high = axes.get_ylim()
    if estimates:
        roof = math.exp(min(max(4 * max(estimates), 1e-3), 700.0))
        low, high = max(low, 1 / roof), min(high, roof)
        axes.set_ylim(low, high)
