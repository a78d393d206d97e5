"""Page of a run, or of several compared: one self-contained HTML file of tables, charts and pictures."""

from collections.abc import Sequence

from markupsafe import Markup

from torchtitan.pictures.number_text import MISSING
from torchtitan.pictures.page_charts import Bar, bar_chart
from torchtitan.runs.compare.charts import Charts
from torchtitan.runs.compare.hardware import compared_hardware, one_machine
from torchtitan.runs.compare.lines import cost
from torchtitan.runs.compare.noise import noise_scales, without_noise
from torchtitan.runs.compare.samples import samples_of
from torchtitan.runs.compare.tables import (
    COSTS,
    Name,
    configuration,
    group_table,
    hardware_table,
    next_steps,
    notes,
    quality_table,
    result_table,
)
from torchtitan.runs.pages import render_page
from torchtitan.runs.record import RunRecord, group_by_seed
from torchtitan.statistics.interval import percentile

# Beginning of every page, which identifies an earlier one.
PAGE_START = '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>Comparison of '


def compare_page(runs: Sequence[RunRecord], smoothing: float | None = None, reload_seconds: int = 0) -> str:
    """Write the page; of one run, its grids over training and what to do with it too.

    Args:
        smoothing: steps of the running mean of training loss and gradient norm; 0 is none; default: 3 % of the longest
            run.
        reload_seconds: after which the page shown in a browser reloads itself; 0: never.
    """
    groups = group_by_seed(runs)
    tracks = list(dict.fromkeys(track for run in runs for track in run.held_out_tags()))
    charts = Charts(runs, groups, smoothing)
    names = [Name(run.name, n) for run in runs for n, group in enumerate(groups) if run in group.runs]
    return render_page(
        "compare.html", title="Comparison of " + (runs[0].name if len(runs) == 1 else f"{len(runs)} runs"),
        runs=len(runs), groups=groups, missing=MISSING, notes=notes(runs),
        over_seeds=group_table(groups, tracks) if any(len(group.runs) > 1 for group in groups) else None,
        results=result_table(names, runs, tracks), quality=quality_table(groups), hardware=hardware_table(names, runs),
        compared=compared_hardware(runs),
        curves=charts.curves(tracks), bins=charts.bins(), costs=_costs(names, runs), samples=samples_of(names, runs),
        configuration=configuration(runs, groups), noise=noise_scales(names, runs), without_noise=without_noise(runs),
        one_machine=one_machine(runs),
        next_steps=next_steps(runs[0]) if len(runs) == 1 else None, reload_seconds=reload_seconds,
    )  # fmt: skip


def _costs(names: Sequence[Name], runs: Sequence[RunRecord]) -> list[tuple[str, Markup]]:
    """Title and chart of every cost that a run has logged."""
    figures = []
    for tag, (title, unit) in COSTS.items():
        bars = []
        for name, run in zip(names, runs, strict=True):
            value, spread = cost(run, tag), run.speeds(tag).tail()
            whisker = (percentile(spread, 0.1), percentile(spread, 0.9)) if spread else ()
            bars.append(Bar(name, name.group, value, *whisker))
        if any(bar.value is not None for bar in bars):
            figures.append((title, bar_chart(bars, unit=unit)))
    return figures
