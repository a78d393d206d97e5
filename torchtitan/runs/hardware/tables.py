"""Tables of the hardware comparison: columns and rows of texts, for the page and for Markdown."""

from collections.abc import Sequence
from typing import Any

from torchtitan.runs.compare.tables import Name, Rows, Table
from torchtitan.runs.compare.text import MISSING, ends_text, interval_text, setting_text, value_text
from torchtitan.runs.hardware import published
from torchtitan.runs.hardware.clocked_runs import CLOCK_NAMES, CLOCKS, WALL, ClockedRun, Hardware
from torchtitan.runs.hardware.inference import Inference
from torchtitan.runs.hardware.rates import (
    Estimate,
    ratio_of_independent_means,
    seconds_to,
    speed_up,
    steps_per_second,
)
from torchtitan.statistics.interval import mean_interval, positive_interval
from torchtitan.training.clock import PARTS

# Labels of what summary.json's "hardware" holds; another key is shown by its name.
_LABELS = {
    "device": "device", "num_devices": "devices", "memory_gib": "memory of one, GiB", "sm_mhz": "clock, MHz",
    "sm_max_mhz": "highest clock, MHz", "memory_mhz": "memory clock, MHz", "memory_max_mhz": "highest memory clock, MHz",
    "driver": "driver", "cuda": "CUDA", "torch": "torch", "cpu": "processor", "threads": "threads",
}  # fmt: skip


def hardware_table(groups: Sequence[Hardware]) -> Table:
    """Hardware as found: a row for each of its properties, a column each."""
    found = [group.runs[0].hardware for group in groups]
    keys = [key for key in _LABELS if any(key in one for one in found)]
    keys += sorted({key for one in found for key in one} - set(keys))
    rows: Rows = [["runs", *(", ".join(run.record.name for run in group.runs) for group in groups)]]
    rows.append(["layout", *(setting_text((group.runs[0].record.summary or {}).get("layout")) for group in groups)])
    for key in keys:
        values = [list(dict.fromkeys(str(run.hardware[key]) for run in group.runs if key in run.hardware)) for group in groups]
        rows.append([_LABELS.get(key, key.replace("_", " ")), *(", ".join(one) or MISSING for one in values)])
    commits = [{str(_versions(run).get("git_commit") or MISSING) for run in group.runs} for group in groups]
    rows.append(["commit of this program", *(", ".join(sorted(one)) for one in commits)])
    return ["as found", *_names(groups)], rows


def speed_table(groups: Sequence[Hardware], with_published: bool) -> Table:
    """Steps per second of each clock, with intervals, and the speed-ups over the first hardware."""
    columns = ["hardware", "runs"]
    for clock in CLOCKS:
        columns += [f"steps/s, {CLOCK_NAMES[clock]}", "interval over"]
    for clock in CLOCKS:
        columns += [f"speed-up, {CLOCK_NAMES[clock]}", "paired over"]
    rows: Rows = []
    for name, group in zip(_names(groups), groups, strict=True):
        row: list[str] = [name, str(len(group.runs))]
        for clock in CLOCKS:
            row += _estimate_texts(steps_per_second(group, clock))
        for clock in CLOCKS:
            row += ["1 (reference)", MISSING] if group is groups[0] else _estimate_texts(speed_up(groups[0], group, clock))
        rows.append(row)
    for one in published.TIMES if with_published else ():
        row = [f"published: {one.device}, {one.steps:,} steps", "1"]
        for clock in CLOCKS:
            row += [value_text(one.steps_per_second), "none"] if clock == one.clock else [MISSING, MISSING]
        rows.append([*row, *[MISSING] * (2 * len(CLOCKS))])
    return columns, rows


def whole_run_table(groups: Sequence[Hardware]) -> Table:
    """Totals of each run: steps, seconds, rates, energy and cost as its summary has them."""
    columns = ["run", "steps", "training alone, s", "wall, s", "steps/s, training alone", "steps/s, wall, all included",
               "energy, kJ", "energy per step, J", "cost", "cost per 1,000 steps"]  # fmt: skip
    rows: Rows = []
    for number, group in enumerate(groups):
        for run in group.runs:
            clock = run.clock
            steps, energy, cost = clock["steps"], clock.get("energy_joules"), clock.get("cost")
            unit = (run.record.summary or {}).get("clock", {}).get("currency")
            rows.append([
                Name(run.record.name, number), f"{steps:,.0f}", value_text(clock["train_seconds"]),
                value_text(clock["wall_seconds"]), value_text(steps / clock["train_seconds"]),
                value_text(steps / clock["wall_seconds"]), value_text(_scaled(energy, 1e-3)),
                value_text(_scaled(energy, 1 / steps)), _price(cost, unit), _price(_scaled(cost, 1000 / steps), unit),
            ])  # fmt: skip
    return columns, rows


def parts_table(groups: Sequence[Hardware]) -> Table:
    """Where the wall time went: seconds of every part of the clock and its share, mean over the runs of each hardware."""
    rows: Rows = []
    for part in PARTS:
        seconds = [mean_interval([run.clock[part] for run in group.runs]).value for group in groups]
        walls = [mean_interval([run.clock["wall_seconds"] for run in group.runs]).value for group in groups]
        if any(seconds):
            rows.append([
                part.replace("_", " "),
                *(f"{value_text(one)} s ({100 * one / wall:.1f} %)" for one, wall in zip(seconds, walls, strict=True)),
            ])  # fmt: skip
    return ["part", *_names(groups)], rows


def time_table(groups: Sequence[Hardware], steps: Sequence[int], with_published: bool) -> Table:
    """Time to N steps on both clocks, geometric mean over the runs with its interval."""
    columns = ["hardware", "clock", *(f"{step:,} steps" for step in steps)]
    rows: Rows = []
    for name, group in zip(_names(groups), groups, strict=True):
        for clock in CLOCKS:
            row: list[str] = [name, CLOCK_NAMES[clock]]
            for step in steps:
                found = [value for run in group.runs if (value := seconds_to(run, step, clock)) is not None]
                row.append(f"{interval_text(positive_interval(found))} s" if found else MISSING)
            rows.append(row)
    for one in published.TIMES if with_published else ():
        texts = [f"{value_text(one.seconds)} s" if step == one.steps else MISSING for step in steps]
        rows.append([f"published: {one.device}", CLOCK_NAMES[one.clock], *texts])
    return columns, rows


def steps_of_table(groups: Sequence[Hardware], with_published: bool) -> list[int]:
    """Steps for the time to N steps: about a quarter, a half, three quarters and all of what every run reached and logged."""
    ends = [run.seconds[WALL].steps for group in groups for run in group.runs]
    last, first = min(steps[-1] for steps in ends), max(steps[0] for steps in ends)
    logged = [step for step in ends[0] if first <= step <= last] or [last]
    chosen = {min(logged, key=lambda step: abs(step - share * last)) for share in (0.25, 0.5, 0.75, 1.0)}
    return sorted(chosen | ({one.steps for one in published.TIMES} if with_published else set()))


def published_table() -> Table:
    """Published rows with the clock of each and its faults."""
    rows: Rows = [
        [
            f"published: {one.device}", f"{one.steps:,}", f"{one.seconds:,.0f}", f"{one.steps_per_second:.4f}",
            f"{1 / one.steps_per_second:.3f}", CLOCK_NAMES[one.clock], one.remark,
        ]
        for one in published.TIMES
    ]  # fmt: skip
    return ["row", "steps", "seconds", "steps/s", "s/step", "clock", "remark"], rows


def published_remarks() -> list[str]:
    """Remarks on the published table, with its speed-ups worked out anew."""
    ratios = published.speed_ups()
    images = published.SECONDS_AN_IMAGE
    told = ", ".join(f"{ratio:.4f} over {steps:,} steps" for steps, ratio in ratios.items())
    shown = " and ".join(f"{ratio:.2f}x" for ratio in sorted({round(each, 2) for each in ratios.values()}))
    return [
        *published.REMARKS,
        f"Speed-up of the A100 over the A40 from the same table: {told}, that is {shown}, against the claimed average of "
        f"{published.CLAIMED_SPEED_UP}x.",
        f"Inference: {images['A40']:.0f} s an image on the A40, {images['A100']:.0f} s on the A100, "
        f"{images['A40'] / images['A100']:.1f}x; neither batch nor warm-up is told.",
    ]


def inference_table(groups: Sequence[Hardware], found: Sequence[Inference | None], with_published: bool) -> Table:
    """Seconds an image by hardware and batch size, with intervals and speed-ups over the first hardware of that batch.

    Args:
        groups: hardware.
        found: of each hardware.
        with_published: also the published ones.
    """
    columns = ["hardware", "batch", "s an image", "images/s", "speed-up", "drawings", "warm-up drawings"]
    rows: Rows = []
    for name, inference in zip(_names(groups), found, strict=True):
        for one in inference.measurements if inference else ():
            each = one.seconds_an_image
            first = first_of_batch(found, one.batch_size)
            base = None if first is inference or first is None else of_batch(first, one.batch_size)
            own = [value / one.batch_size for value in one.seconds]
            ratio = ends_text(ratio_of_independent_means(base, own)) if base else "1 (reference)"
            rows.append([
                name, str(one.batch_size), interval_text(each), value_text(1 / each.value), ratio, str(len(one.seconds)),
                str(one.warm_up),
            ])  # fmt: skip
    for device, seconds in published.SECONDS_AN_IMAGE.items() if with_published else ():
        rows.append([
            f"published: {device}", "not told", value_text(seconds), value_text(1 / seconds), MISSING, "1", "not told"
        ])
    return columns, rows


def first_of_batch(found: Sequence[Inference | None], batch_size: int) -> Inference | None:
    return next((one for one in found if one and of_batch(one, batch_size)), None)


def of_batch(inference: Inference, batch_size: int) -> list[float]:
    """Seconds an image of each drawing of a batch size; none where it was not measured."""
    return [
        value / one.batch_size for one in inference.measurements if one.batch_size == batch_size for value in one.seconds
    ]


def _names(groups: Sequence[Hardware]) -> list[Name]:
    return [Name(group.name, number) for number, group in enumerate(groups)]


def _estimate_texts(estimate: Estimate | None) -> list[str]:
    return [ends_text(estimate.interval), estimate.basis] if estimate else [MISSING, MISSING]


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _price(value: float | None, unit: Any) -> str:
    return value_text(value) + (f" {unit}" if isinstance(unit, str) and unit and value is not None else "")


def _versions(run: ClockedRun) -> dict[str, Any]:
    versions = (run.record.summary or {}).get("versions")
    return versions if isinstance(versions, dict) else {}


