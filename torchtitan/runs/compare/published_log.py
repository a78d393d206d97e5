"""Loss of a run against a published training log, with a band for what chance can do."""

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from torchtitan.runs.record import RunRecord, RunRecordError

_LINE = re.compile(r"\bstep\W+0*(\d+)\b.*?\bloss\W{1,3}(\d+(?:\.\d+)?(?:e[-+]?\d+)?)", re.IGNORECASE)
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")  # as torchtitan writes its console's lines
# Standard errors of the run's mean that the band is wide on each side.
_WIDTH = 3.0
# Relative standard deviation over seeds of the mean loss of the first and second hundred steps, where the loss falls steeply
# and the initial weights matter: 12 seeds of the debug model on digits, batch 64, Adam at a constant 2e-4 with beta2 .95.
SEED_SPREAD = {100: 0.0048, 200: 0.032}


@dataclass(frozen=True)
class LogPoint:
    """One step of a published log beside the run's mean loss of the steps that lead to it."""

    step: int
    published: float
    mean: float
    half_width: float

    @property
    def inside(self) -> bool:
        return abs(self.published - self.mean) <= self.half_width


def read_log(path: Path) -> dict[int, float]:
    """Read the loss by step from lines that name `step` and `loss`. Raises RunRecordError: there is none."""
    try:
        lines = _COLOUR.sub("", path.read_text(errors="replace")).splitlines()
        matches = (_LINE.search(line) for line in lines)
    except OSError as error:
        raise RunRecordError(f"{path}: {error.strerror}") from error
    found = {int(match[1]): float(match[2]) for match in matches if match}
    if not found:
        raise RunRecordError(f"{path}: no line has a step and a loss, as in `step=100, loss: 1.2133`")
    return found


def against_log(run: RunRecord, log: Mapping[int, float]) -> list[LogPoint]:
    """Compare a run with a log at the log's steps, over the log's smallest distance of steps.

    Steps without two logged losses within that distance are left out.

    Raises:
        RunRecordError: all are, or the log has a line for each step, of one batch's loss.
    """
    width = distance(log)
    if width < 2:
        raise RunRecordError("--log: has the loss of each step, of one batch (give means over ten steps or more, a line each)")
    points = list(_points(run, log, width))
    if not points:
        raise RunRecordError(
            f"{run.folder}: needs two logged losses within the {width} steps before a step of the log"
            f" (--metrics.log_freq {max(width // 10, 1)})"
        )
    return points


def distance(log: Mapping[int, float]) -> int:
    """Smallest distance of a log's steps, the first one's from 0 among them; of step 1, which logs begin with, it is none."""
    steps = [0, *(step for step in sorted(log) if step > 1)]
    return min((after - before for before, after in itertools.pairwise(steps)), default=1)


def _points(run: RunRecord, log: Mapping[int, float], width: int) -> Iterator[LogPoint]:
    series = run.series(run.weighted_error_tag)  # as published, without further terms of the loss
    logged = [*zip(series.steps, series.values, np.diff([0, *series.steps]).tolist(), strict=True)]
    for step, published in sorted(log.items()):
        # A logged loss is the mean over the steps since the one before.
        found = [(value, steps) for at, value, steps in logged if step - width < at <= step <= run.last_step]
        if len(found) < 2:
            continue
        values, steps = np.array(found).T
        mean = float(np.average(values, weights=steps))
        error = math.sqrt(steps @ (values - mean) ** 2 / ((len(values) - 1) * steps.sum()))
        yield LogPoint(step, published, mean, _WIDTH * math.hypot(error, SEED_SPREAD.get(step, 0.0) * mean))


def log_table(points: list[LogPoint], log: Mapping[int, float], last_step: int) -> str:
    """Table of the comparison as text, with a verdict in its last line, and the steps of the log that were left out."""
    rows = [
        f"{point.step:>9,}  {point.published:10.4f}  {point.mean:10.4f}  ± {point.half_width:.4f}  "
        f"{point.mean / point.published - 1:+7.1%}  {'inside' if point.inside else 'OUTSIDE'}"
        for point in points
    ]
    inside, reached = sum(point.inside for point in points), sum(step <= last_step for step in log)
    heading = f"{'step':>9}  {'published':>10}  {'this run':>10}  {'band':8}  {'off':>7}"
    verdict = f"{inside} of {len(points)} within the band of {_WIDTH:g} standard errors"
    if reached > len(points):
        verdict += (
            f"; {reached - len(points)} of the log's steps left out, without two logged losses in the {distance(log)} steps"
            f" before (--metrics.log_freq {max(distance(log) // 10, 1)})"
        )
    return "\n".join([heading, *rows, verdict])
