"""Table at the end of a sweep; intervals and plots are optimization_analysis.py's."""

import statistics
from pathlib import Path

from torchtitan.experiments.record import Row
from torchtitan.training.metric_points import read_points
from torchtitan.training.metrics import METRICS_FILE

_RATE = "throughput(img/s)"
_MEMORY = ("memory/max_reserved(GiB)", "memory/max_resident(GiB)")


def sweep_table(rows: list[Row], folder: Path, warmup_steps: int) -> str:
    """Format one line per run: status, median images/s and peak memory after the warm-up, reason.

    Args:
        rows: of the sweep's record.
        folder: of the sweep.
        warmup_steps: a point counts if its window holds none of them.
    """
    width = max((len(row["name"]) for row in rows), default=4)
    lines = [f"{'run':<{width}}  status        img/s      GiB  reason"]
    for row in rows:
        rate = memory = None
        if row["status"] == "ok":
            rate, memory = _measured(folder / row["run"] / METRICS_FILE, warmup_steps)
        shown_rate, shown_memory = ("-" if value is None else f"{value:.2f}" for value in (rate, memory))
        line = f"{row['name']:<{width}}  {row['status']:<8}  {shown_rate:>9}  {shown_memory:>7}  {row['reason']}"
        lines.append(line.rstrip())
    return "\n".join(lines)


def _measured(path: Path, warmup_steps: int) -> tuple[float | None, float | None]:
    try:
        points = read_points(path).points
    except OSError:
        return None, None
    points = [point for point in points if _RATE in point]
    before = [0, *(point["step"] for point in points)]
    counted = [point for point, start in zip(points, before, strict=False) if start >= warmup_steps]
    memories = [point[tag] for point in points for tag in _MEMORY if tag in point]
    rates = [point[_RATE] for point in counted]
    return (statistics.median(rates) if rates else None), (max(memories) if memories else None)
