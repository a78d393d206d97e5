"""Table of all runs as CSV: axes, status, measures with their intervals."""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchtitan.files.durable import replacing
from torchtitan.runs.analysis.axes import NAMED_AXES, Axes
from torchtitan.runs.analysis.collect import Run
from torchtitan.runs.analysis.measures import IMAGES, METRICS
from torchtitan.statistics.interval import Interval

Row = dict[str, Any]


def run_rows(runs: Sequence[Run]) -> list[Row]:
    """Rows of the runs: axes, repeat, status, measures with the ends of their intervals, device and versions."""
    names = _axis_names([run.axes for run in runs])
    rows = []
    for run in runs:
        images = run.measures.get(IMAGES.name)
        rows.append({
            "name": run.name, **{name: run.axes.get(name) for name in names}, "repeat": run.repeat,
            "status": run.status, "reason": run.reason, "points": run.points, "warmup_steps": run.warmup_steps,
            **_columns(run.measures), "interval_coverage": images.coverage if images else None,
            "torch": run.versions.get("torch"), "git_commit": run.versions.get("git_commit"),
            "notes": "; ".join(run.notes) or None,
        })
    return rows


def write_csv(rows: Sequence[Row], path: Path) -> None:
    """Write CSV: floats with all their digits, nothing for None."""
    with replacing(path) as unfinished, open(unfinished, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def _columns(measures: dict[str, Interval]) -> Row:
    columns: Row = {}
    for metric in METRICS:
        estimate = measures.get(metric.name)
        columns[metric.name] = estimate.value if estimate else None
        columns[f"{metric.name}_lower"] = estimate.lower if estimate and estimate.bounded else None
        columns[f"{metric.name}_upper"] = estimate.upper if estimate and estimate.bounded else None
    return columns


def _axis_names(all_axes: Sequence[Axes]) -> list[str]:
    return list(dict.fromkeys((*NAMED_AXES, *(name for axes in all_axes for name in axes))))
