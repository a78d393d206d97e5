"""Estimates with confidence intervals: means, paired differences, medians, shares."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torchtitan.statistics.student import student_quantile


@dataclass(frozen=True)
class Interval:
    """Interval: an estimate with the ends of its confidence interval.

    Attributes:
        lower, upper: ends; infinite on an unbounded side.
        coverage: probability that the interval holds the true value; None where none is claimed.
    """

    value: float
    lower: float = -math.inf
    upper: float = math.inf
    count: int = 1
    coverage: float | None = None

    @property
    def bounded(self) -> bool:
        return math.isfinite(self.lower) and math.isfinite(self.upper)

    @property
    def half_width(self) -> float:
        return (self.upper - self.lower) / 2

    def excludes(self, value: float) -> bool:
        """True if the value is outside."""
        return value < self.lower or value > self.upper

    def scaled(self, factor: float) -> "Interval":
        """Interval of `factor` times the quantity, factor > 0."""
        return Interval(self.value * factor, self.lower * factor, self.upper * factor, self.count, self.coverage)


def mean_interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """Mean of independent normal values with Student's interval, mean ± t s / sqrt(n).

    Args:
        values: any number; a single one leaves the mean unbounded. Without any, or with an infinite one, all of the
            result is NaN or infinite.
    """
    count = len(values)
    mean = statistics.fmean(values) if values else math.nan
    if not math.isfinite(mean):
        return Interval(mean, mean, mean, count)
    if count == 1:
        return Interval(mean)
    half = student_quantile(0.5 + 0.5 * confidence, count - 1.0) * statistics.stdev(values) / math.sqrt(count)
    return Interval(mean, mean - half, mean + half, count, confidence)


def paired_difference(values: Mapping[int, float], reference: Mapping[int, float]) -> Interval:
    """Mean of `values` minus `reference`, paired by key (a seed), over the keys that both have."""
    return mean_interval([values[key] - reference[key] for key in sorted(values) if key in reference])


def positive_interval(values: Sequence[float]) -> Interval:
    """Geometric mean of positive values with Student's interval over their logarithms: both ends are positive.

    As `mean_interval` for values that differ little. With a zero, negative or infinite value it is that, the lower end not below
    zero where no value is.
    """
    if len(values) < 2 or not all(0.0 < value < math.inf for value in values):
        mean = mean_interval(values)
        return replace(mean, lower=max(mean.lower, 0.0)) if mean.bounded and min(values) >= 0 else mean
    logs = mean_interval([math.log(value) for value in values])
    value, lower, upper = (math.exp(min(end, 700.0)) for end in (logs.value, logs.lower, logs.upper))
    return Interval(value, lower, upper, logs.count, logs.coverage)


def median_interval(values: Sequence[float]) -> Interval:
    """Median with the interval between two order statistics, whatever the distribution of independent values.

    [x_(k), x_(n+1-k)] covers the median with probability 1 - 2 P(Binomial(n, 1/2) < k); k is the largest for which that
    is at least 95 %. Below six values none reaches 95 %: then it is the range, with its lower `coverage`. A
    single value leaves the median unbounded.

    Source: David and Nagaraja, "Order Statistics", section 7.1.
    """
    ordered, n = sorted(values), len(values)
    median = statistics.median(ordered)
    if n == 1:
        return Interval(median)
    rank, tail = 1, _binomial(n, 0)  # P(Binomial < rank)
    while rank < n // 2:
        further = tail + _binomial(n, rank)
        if 2 * further > 0.05:
            break
        rank, tail = rank + 1, further
    return Interval(median, ordered[rank - 1], ordered[n - rank], n, 1 - 2 * tail)


def binomial_interval(successes: int, trials: int, confidence: float = 0.95) -> Interval:
    """Share of successes in independent trials with Wilson's interval, which stays in [0, 1] and has a width at 0 and 1 too.

    Args:
        successes: in 0..trials.
        trials: at least 1.

    Source: Wilson, "Probable Inference, the Law of Succession, and Statistical Inference", 1927.
    """
    share = successes / trials
    z = statistics.NormalDist().inv_cdf(0.5 + 0.5 * confidence)
    middle = (share + z * z / (2 * trials)) / (1 + z * z / trials)
    half = z * math.sqrt(share * (1 - share) / trials + (z / (2 * trials)) ** 2) / (1 + z * z / trials)
    lower = middle - half if successes else 0.0  # an end is the share itself there, but for rounding
    upper = middle + half if successes < trials else 1.0
    return Interval(share, lower, upper, trials, confidence)


def percentile(values: Sequence[float], fraction: float) -> float:
    """Percentile: value below which a fraction of the values lies, linear between neighbours; fraction in [0, 1]."""
    ordered = sorted(values)
    place = fraction * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def _binomial(n: int, k: int) -> float:
    """Binomial probability of k in n throws of a coin; by logarithms, as 2^-n is 0 for the points of a long run."""
    return math.exp(math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1) - n * math.log(2))
