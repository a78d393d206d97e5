"""Page that compares hardware by runs of the same settings: one self-contained HTML file, and its tables in Markdown."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from torchtitan.pictures.markdown import bullet, inline, markdown_table
from torchtitan.pictures.page_charts import Bar, Line, bar_chart, line_chart
from torchtitan.runs.compare.charts import Charts
from torchtitan.runs.compare.samples import samples_of
from torchtitan.runs.compare.tables import Name, Table, notes
from torchtitan.runs.compare.text import MISSING, settings_text
from torchtitan.runs.hardware import published
from torchtitan.runs.hardware.clocked_runs import (
    CLOCK_NAMES,
    CLOCKS,
    ClockedRun,
    Hardware,
    by_hardware,
    differing_places,
)
from torchtitan.runs.hardware.inference import FILE, Inference, read_inference
from torchtitan.runs.hardware.rates import Estimate, ratio_of_independent_means, speed_up, steps_per_second
from torchtitan.runs.hardware.tables import (
    first_of_batch,
    hardware_table,
    inference_table,
    of_batch,
    parts_table,
    published_remarks,
    published_table,
    speed_table,
    steps_of_table,
    time_table,
    whole_run_table,
)
from torchtitan.runs.pages import render_page
from torchtitan.runs.record import RunGroup
from torchtitan.statistics.interval import Interval

# Beginnings of every page and of its tables in Markdown, which identify earlier ones.
PAGE_START = '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>Hardware compared: '
MARKDOWN_START = "# Hardware compared: "

SPEED_NOTE = (
    "Steps per second between the first logged point and the last, so without start-up and the first steps. Intervals are "
    "95 %: of one run over its windows between logged points (Fieller), taken as independent, which tells the spread within "
    "the run and not how the next run would differ; of several runs over the runs (Student). Windows with saving or sampling "
    "widen the interval of the wall clock."
)
SPEED_UP_NOTE = (
    "Over the first hardware. Paired: runs of equal seeds (Student's interval of the log ratios) or, of single runs, windows "
    "of equal steps, which hold the same images and interruptions (Fieller)."
)


@dataclass(frozen=True)
class Comparison:
    """Comparison of hardware, written as a page and as Markdown.

    Attributes:
        title: short.
        notes: left-out parts and cautions.
        hardware, speed, whole_runs, parts, times, inference, published: tables; None: nothing is known of it.
        groups: hardware with its runs.
        inferences: of each hardware.
    """

    title: str
    notes: list[str]
    groups: list[Hardware]
    inferences: list[Inference | None]
    hardware: Table
    speed: Table
    whole_runs: Table
    parts: Table
    times: Table
    inference: Table | None
    published: Table | None


def compare(runs: Sequence[ClockedRun], with_published: bool) -> Comparison:
    """Compare hardware by runs of the same settings.

    Args:
        runs: as read_clocked_runs gives them; the first one's hardware is the reference.
        with_published: also the published table.
    """
    groups = by_hardware(runs)
    found, problems = _inferences(groups)
    table = inference_table(groups, found, with_published)
    return Comparison(
        title=f"{len(groups)} on {len(runs)} {'run' if len(runs) == 1 else 'runs'}",
        notes=notes([run.record for run in runs]) + _differences(runs) + problems,
        groups=groups,
        inferences=found,
        hardware=hardware_table(groups),
        speed=speed_table(groups, with_published),
        whole_runs=whole_run_table(groups),
        parts=parts_table(groups),
        times=time_table(groups, steps_of_table(groups, with_published), with_published),
        inference=table if table[1] else None,
        published=published_table() if with_published else None,
    )


def hardware_page(comparison: Comparison, smoothing: float | None = None) -> str:
    """Write the page.

    Args:
        comparison: of at least one run.
        smoothing: steps of the running mean of the losses; 0 is none; default: 10 % of the longest run.
    """
    groups = comparison.groups
    run_groups = [RunGroup(group.name, tuple(run.record for run in group.runs)) for group in groups]
    records = [run for group in run_groups for run in group.runs]
    width = round(0.1 * max(record.last_step for record in records)) if smoothing is None else smoothing
    charts = Charts(records, run_groups, width, window_bands=True)
    shown = _of_one_seed(groups)
    return render_page(
        "hardware.html", title="Hardware compared: " + comparison.title, comparison=comparison, groups=run_groups,
        missing=MISSING, speed_note=SPEED_NOTE, speed_up_note=SPEED_UP_NOTE, curves=_time_curves(groups),
        speeds=_speed_bars(groups), speed_ups=_speed_up_bars(groups),
        inference_bars=_inference_bars(comparison), published_bars=_published_bars(len(groups)) if comparison.published else None,
        remarks=published_remarks(), published_title=published.TITLE, bins=charts.bins(),
        samples=samples_of([Name(groups[n].name, n) for n in shown], [run.record for run in shown.values()]),
    )  # fmt: skip


def hardware_markdown(comparison: Comparison) -> str:
    """Write the tables in Markdown."""
    parts = [MARKDOWN_START + inline(comparison.title) + "\n\n"]
    parts += [bullet(note) + "\n" for note in comparison.notes] + (["\n"] if comparison.notes else [])
    sections: list[tuple[str, str, Table | None]] = [
        ("Hardware as found", "", comparison.hardware), ("Steps per second", SPEED_NOTE + " " + SPEED_UP_NOTE, comparison.speed),
        ("Time to N steps", "", comparison.times), ("Whole runs", "", comparison.whole_runs),
        ("Where the time went", "", comparison.parts), ("Seconds an image at inference", "", comparison.inference),
        (f"Published: {published.TITLE}", "", comparison.published),
    ]  # fmt: skip
    for title, note, table in sections:
        if table:
            parts.append(f"## {inline(title)}\n\n" + (f"{inline(note)}\n\n" if note else "") + markdown_table(*table))
    if comparison.published:
        parts += [bullet(remark) + "\n" for remark in published_remarks()]
    return "".join(parts).rstrip("\n") + "\n"


def _differences(runs: Sequence[ClockedRun]) -> list[str]:
    """Notes on what else differs: places that were given as the same, and versions of this program."""
    records = [run.record for run in runs]
    found = [
        f"{key} differs ({settings_text([record.settings.get(key) for record in records])}) and was given as the same"
        for key in differing_places(runs)
    ]
    versions = [(record.summary or {}).get("versions") for record in records]
    commits = {str(one.get("git_commit")) for one in versions if isinstance(one, dict)}
    if len(commits) > 1:
        found.append(f"The runs are of {len(commits)} commits of this program: {', '.join(sorted(commits))}.")
    return found


def _inferences(groups: Sequence[Hardware]) -> tuple[list[Inference | None], list[str]]:
    """Measurements of inference of each hardware, and notes on those that do not count."""
    found: list[Inference | None] = []
    problems = []
    reference: dict[str, Any] | None = None
    for group in groups:
        chosen = None
        for run in group.runs:
            try:
                one = read_inference(run.record.folder)
            except (OSError, ValueError) as error:
                problems.append(f"{run.record.name}: {FILE}: {error} (left out; measure it again)")
                continue
            if one is None or chosen:
                continue
            if one.hardware.get("device") != run.hardware.get("device"):
                where = one.hardware.get("device")
                problems.append(f"{run.record.name}: {FILE} was measured on {where}, not on the run's hardware (left out)")
            elif reference is not None and (keys := _differing(reference, one.method)):
                problems.append(f"{run.record.name}: {FILE} differs in {', '.join(keys)} from the first (left out)")
            else:
                chosen, reference = one, reference or one.method
        found.append(chosen)
    return found, problems


def _differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    return [key for key in sorted({*one, *other}) if one.get(key) != other.get(key)]


def _of_one_seed(groups: Sequence[Hardware]) -> dict[int, ClockedRun]:
    """Run of each hardware for the samples: of the first seed that most hardware has, with samples."""
    with_samples = [[run for run in group.runs if run.record.samples] for group in groups]
    seeds = [run.record.seed for runs in with_samples for run in runs]
    if not seeds:
        return {}
    shared = max(dict.fromkeys(seeds), key=lambda seed: sum(seed in [run.record.seed for run in runs] for runs in with_samples))
    found = {n: next((run for run in runs if run.record.seed == shared), None) for n, runs in enumerate(with_samples)}
    return {n: run for n, run in found.items() if run is not None}


# ---------------------------------------------------------------------- charts


def _time_curves(groups: Sequence[Hardware]) -> list[tuple[str, Markup]]:
    """Title and chart of the time over steps, by clock, on one axis."""
    longest = max(run.seconds[clock].values[-1] for group in groups for run in group.runs for clock in CLOCKS)
    last = max(run.seconds[clock].steps[-1] for group in groups for run in group.runs for clock in CLOCKS)
    unit, size = next((name, size) for name, size in (("hours", 3600), ("minutes", 60), ("seconds", 1)) if longest > 2 * size
                      or size == 1)  # fmt: skip
    found = []
    for clock in CLOCKS:
        lines = [
            Line([(step, value / size) for step, value in zip(one.steps, one.values, strict=True)], n, run.record.name)
            for n, group in enumerate(groups) for run in group.runs for one in [run.seconds[clock]]
        ]  # fmt: skip
        chart = line_chart(lines, x_label="step", y_label=unit, log=False, x_values=(0, last), y_values=(0, longest / size))
        found.append((f"Time to N steps, {CLOCK_NAMES[clock]}", chart))
    return found


def _bar(name: str, group: int, interval: Interval | None) -> Bar:
    if interval is None:
        return Bar(name, group, None)
    low, high = (interval.lower, interval.upper) if interval.bounded else (interval.value, interval.value)
    return Bar(name, group, interval.value, low, high)


def _interval(estimate: Estimate | None) -> Interval | None:
    return estimate.interval if estimate else None


def _speed_bars(groups: Sequence[Hardware]) -> list[tuple[str, Markup]]:
    return [
        (f"Steps per second, {CLOCK_NAMES[clock]}", bar_chart(
            [_bar(group.name, n, _interval(steps_per_second(group, clock))) for n, group in enumerate(groups)],
            unit=f"steps/s, {CLOCK_NAMES[clock]}",
        ))
        for clock in CLOCKS
    ]  # fmt: skip


def _speed_up_bars(groups: Sequence[Hardware]) -> list[tuple[str, Markup]]:
    bars = {
        clock: [
            _bar(group.name, n, Interval(1.0) if n == 0 else _interval(speed_up(groups[0], group, clock)))
            for n, group in enumerate(groups)
        ]
        for clock in CLOCKS
    }
    return [
        (f"Speed-up, {CLOCK_NAMES[clock]}", bar_chart(bars[clock], unit=f"times {groups[0].name}")) for clock in CLOCKS
    ] if len(groups) > 1 else []  # fmt: skip


def _inference_bars(comparison: Comparison) -> list[tuple[str, Markup]]:
    """Seconds an image and speed-ups of every batch size that was measured."""
    found = comparison.inferences
    sizes = sorted({one.batch_size for inference in found if inference for one in inference.measurements})
    charts = []
    for size in sizes:
        times = {n: one for n, inference in enumerate(found) if inference
                 for one in inference.measurements if one.batch_size == size}  # fmt: skip
        bars = [_bar(comparison.groups[n].name, n, one.seconds_an_image) for n, one in times.items()]
        charts.append((f"Seconds an image, batch {size}", bar_chart(bars, unit="seconds an image")))
        first = first_of_batch(found, size)
        if len(times) > 1 and first is not None:
            base = of_batch(first, size)
            ratios = {
                n: Interval(1.0) if found[n] is first
                else ratio_of_independent_means(base, [value / size for value in one.seconds])
                for n, one in times.items()
            }  # fmt: skip
            bars = [_bar(comparison.groups[n].name, n, ratio) for n, ratio in ratios.items()]
            charts.append((f"Speed-up at inference, batch {size}", bar_chart(bars, unit="times the first")))
    return charts


def _published_bars(colour: int) -> Markup:
    """Published speed-ups, one colour behind those of the hardware; the table has no repeats, so there are no whiskers."""
    ratios = [(f"A100, {steps:,} steps", ratio) for steps, ratio in published.speed_ups().items()]
    ratios.append(("claimed average", published.CLAIMED_SPEED_UP))
    images = published.SECONDS_AN_IMAGE
    ratios.append(("A100, inference", images["A40"] / images["A100"]))
    return bar_chart([Bar(f"published: {name}", colour, value, value, value) for name, value in ratios], unit="times the A40")
