"""Recover a run's clock at its start: from its checkpoint, and from later records."""

import json
from contextlib import suppress
from pathlib import Path

from torchtitan.files.regular import read_regular
from torchtitan.training.clock import PARTS, ClockTotals
from torchtitan.training.metric_points import iter_points

_LARGEST_SUMMARY = 16 << 20  # bytes
_LAST_TAG = '"clock/wall(s)"'


def recovered(checkpoint: ClockTotals, step: int, metrics: Path, summary: Path) -> ClockTotals:
    """Recover the totals of a run that resumes; before its metrics are cut back.

    What a process did after its last logged point is unknown, unless it closed the run with a summary.

    Args:
        checkpoint: totals in the checkpoint; zero without one.
        step: of the checkpoint; 0 without one.
        metrics: metrics.jsonl, with points beyond the checkpoint if the last process went beyond it.
        summary: summary.json of the last process that wrote one.
    """
    start, latest = checkpoint, checkpoint
    if (closed := _summary_totals(summary)) is not None:
        closed_step, totals = closed
        if closed_step == step and totals.wall_ns > start.wall_ns:  # saved, then ended: nothing is lost
            start = totals
        if closed_step >= step:
            latest = _later(latest, totals)
    return start.after_loss(_latest_beyond(step, metrics, latest))


def _later(one: ClockTotals, other: ClockTotals) -> ClockTotals:
    return other if other.wall_ns > one.wall_ns else one


def _summary_totals(path: Path) -> tuple[int, ClockTotals] | None:
    try:
        summary = json.loads(read_regular(path, _LARGEST_SUMMARY))
        step, clock = summary["step"], summary["clock"]
        totals = ClockTotals.from_seconds(clock, clock["steps"], clock.get("energy_joules"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return (step, totals) if type(step) is int and totals is not None else None


def _latest_beyond(step: int, path: Path, latest: ClockTotals) -> ClockTotals:
    """Latest totals: those given, or of a logged point after a step."""
    with suppress(OSError):  # a run that begins has no metrics; other causes are reported where they are opened to be written
        for point in iter_points(path, _LAST_TAG):
            seconds = {name: point.get(f"clock/{name}(s)") for name in PARTS}
            totals = ClockTotals.from_seconds(seconds, point.get("clock/steps"), point.get("clock/energy(J)"))
            if point["step"] > step and totals is not None:
                latest = _later(latest, totals)
    return latest
