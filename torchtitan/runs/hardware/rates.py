"""Steps per second and speed-ups with their 95 % intervals, from the clocks of runs."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from torchtitan.runs.hardware.clocked_runs import ClockedRun, Hardware, Window
from torchtitan.statistics.interval import Interval, mean_interval, positive_interval
from torchtitan.statistics.ratio_intervals import fieller, log_delta
from torchtitan.statistics.student import student_quantile

_CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """Estimate with its interval.

    Attributes:
        interval: unbounded where there is nothing to take one from.
        basis: observations of the interval, in words.
    """

    interval: Interval
    basis: str


def steps_per_second(hardware: Hardware, clock: str) -> Estimate | None:
    """Steps per second between the first and the last logged point, on one of CLOCKS; None without two points.

    Of one run: over its windows, Fieller's ratio of their mean steps to their mean seconds. Of several: the geometric
    mean of the runs' rates, Student's interval over their logarithms.
    """
    runs = [run for run in hardware.runs if run.windows]
    if not runs:
        return None
    if len(runs) > 1:
        rates = [_total(run.windows, clock) for run in runs]
        return Estimate(positive_interval(rates, _CONFIDENCE), f"{len(runs)} runs")
    windows = runs[0].windows
    steps, seconds = [float(one.end - one.start) for one in windows], [one.seconds[clock] for one in windows]
    return Estimate(ratio_of_means(steps, seconds), f"{len(windows)} windows")


def speed_up(reference: Hardware, other: Hardware, clock: str) -> Estimate | None:
    """Speed-up of other hardware: its steps per second by those of the reference, on one of CLOCKS.

    Runs of equal seeds on both are pairs: Student's interval of their mean log ratio. Without two such pairs, several
    runs on both: the log-delta interval of the ratio of two independent means. Of single runs: their windows of equal
    steps, which train on the same images and hold the same interruptions, are pairs; Fieller's ratio of mean seconds
    per step. The last says nothing about how the next run would differ.

    Returns:
        None where neither has anything in common.
    """
    rates = [
        {run.record.seed: _total(run.windows, clock) for run in hardware.runs if run.windows} for hardware in (reference, other)
    ]
    pairs = sorted((seed for seed in rates[0] if seed in rates[1]), key=str)
    if len(pairs) > 1:
        logs = mean_interval([math.log(rates[1][seed] / rates[0][seed]) for seed in pairs], _CONFIDENCE)
        ends = math.exp(logs.value), math.exp(logs.lower), math.exp(logs.upper)
        return Estimate(Interval(*ends, logs.count, logs.coverage), f"{len(pairs)} pairs of runs")
    of_runs = [[_total(run.windows, clock) for run in hardware.runs if run.windows] for hardware in (reference, other)]
    if min(map(len, of_runs)) > 1:
        return Estimate(ratio_of_independent_means(of_runs[1], of_runs[0]), f"{len(of_runs[0])} and {len(of_runs[1])} runs")
    return _by_windows(reference, other, clock)


def ratio_of_means(numerators: Sequence[float], denominators: Sequence[float]) -> Interval:
    """Ratio of the means of paired positive values, with Fieller's interval at Student's t; unbounded below two pairs."""
    count = len(numerators)
    n, d = statistics.fmean(numerators), statistics.fmean(denominators)
    if count < 2:
        return Interval(n / d)
    covariance = statistics.covariance(numerators, denominators) / count
    variances = statistics.variance(numerators) / count, statistics.variance(denominators) / count
    quantile = student_quantile(0.5 + 0.5 * _CONFIDENCE, count - 1.0)
    lower, upper, _ = fieller(n, d, *variances, covariance, quantile)
    return Interval(n / d, lower, upper, count, _CONFIDENCE)


def ratio_of_independent_means(numerators: Sequence[float], denominators: Sequence[float]) -> Interval:
    """Ratio of the means of independent positive values, with the log-delta interval; unbounded below two values of each.

    Student's t has the degrees of freedom of the smaller sample, which makes the interval too wide rather than too narrow.
    """
    n, d = statistics.fmean(numerators), statistics.fmean(denominators)
    count = min(len(numerators), len(denominators))
    if count < 2:
        return Interval(n / d)
    variances = [statistics.variance(values) / len(values) for values in (numerators, denominators)]
    quantile = student_quantile(0.5 + 0.5 * _CONFIDENCE, count - 1.0)
    lower, upper, _ = log_delta(n, d, *variances, 0.0, quantile)
    return Interval(n / d, lower, upper, count, _CONFIDENCE)


def seconds_to(run: ClockedRun, step: int, clock: str) -> float | None:
    """Seconds from the run's start to the end of a step, between logged points a straight line; None where unknown."""
    series = run.seconds[clock]
    if not len(series) or not series.steps[0] <= step <= series.steps[-1]:
        return None
    return series.at(step)


def _total(windows: Sequence[Window], clock: str) -> float:
    return sum(one.end - one.start for one in windows) / sum(one.seconds[clock] for one in windows)


def _by_windows(reference: Hardware, other: Hardware, clock: str) -> Estimate | None:
    """Speed-up by the windows of two runs, of equal seeds if there are."""
    of_seed = {run.record.seed: run for run in reversed(reference.runs)}
    first, second = next(
        ((of_seed[run.record.seed], run) for run in other.runs if run.record.seed in of_seed),
        (reference.runs[0], other.runs[0]),
    )
    windows = {(one.start, one.end): one for one in first.windows}
    pairs = [(windows[place], one) for one in second.windows if (place := (one.start, one.end)) in windows]
    if not pairs:
        return None
    ratio = ratio_of_means([one.per_step(clock) for one, _ in pairs], [one.per_step(clock) for _, one in pairs])
    return Estimate(ratio, f"{len(pairs)} pairs of windows")
