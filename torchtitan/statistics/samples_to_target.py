"""Samples to a target loss as a function of the batch size: a hyperbola, its critical batch, and the best learning rate.

    E(B) = E_min (1 + B / B_c)

is the cost in samples of the empirical model (S / S_min - 1) (E / E_min - 1) = 1 with S = E / B steps: at B = B_c training
takes twice the least samples, and twice the least steps.

Source: McCandlish et al., "An Empirical Model of Large-Batch Training", arXiv 1812.06162, eq. 2.11.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Literal

from torchtitan.statistics.fisher import chi_squared_tail, fisher_tail
from torchtitan.statistics.interval import Interval
from torchtitan.statistics.ratio_intervals import fieller
from torchtitan.statistics.student import student_quantile

_MANY = 1e6  # degrees of freedom at which Student's t is normal


@dataclass(frozen=True)
class SamplesToTarget:
    """Samples that runs of one batch size took to a target.

    Attributes:
        batch_size: global.
        mean: of samples, over runs.
        deviation: standard deviation of one run.
        runs: their number, at least 2.
    """

    batch_size: float
    mean: float
    deviation: float
    runs: int

    @classmethod
    def of_runs(cls, batch_size: float, samples: Sequence[float]) -> "SamplesToTarget":
        """Measurement of the samples of each run, at least two, all of which reached the target."""
        return cls(batch_size, fmean(samples), stdev(samples), len(samples))


@dataclass(frozen=True)
class Hyperbola:
    """Fit of E(B) = E_min (1 + B / B_c).

    Attributes:
        least: E_min in samples.
        critical: B_c in samples, with its profile-likelihood interval: of all B_c whose best fit is not significantly worse.
            Without an upper end where E does not rise significantly with B. Both intervals hold if the hyperbola does.
        residuals: measured / fitted - 1, of each batch size.
        p_value: of the goodness of fit: probability of residuals as large if the hyperbola holds; NaN for two batch sizes,
            which any hyperbola fits.
    """

    least: Interval
    critical: Interval
    residuals: tuple[float, ...]
    p_value: float

    def rejected(self, level: float = 0.05) -> bool:
        """Whether the data contradict the hyperbola, so that there is no B_c of which to speak."""
        return self.p_value < level

    def __call__(self, batch_size: float) -> float:
        """Samples E(B)."""
        return self.least.value * (1.0 + batch_size / self.critical.value)


def fit_hyperbola(
    rows: Sequence[SamplesToTarget], confidence: float = 0.95, spread: Literal["own", "pooled"] = "pooled"
) -> Hyperbola:
    """Fit the hyperbola by weighted least squares; it is a line in B of intercept E_min and slope E_min / B_c.

    The profile likelihood of B_c, a ratio of the line's two parameters, has a closed form, which is Fieller's.

    Args:
        rows: of at least two batch sizes, each tuned in its learning rate.
        confidence: of the intervals.
        spread: standard errors by each row's own deviation, taken as known, which needs some 20 runs of each (of five,
            intervals of 95 % cover 87 %, and a true hyperbola is rejected at 5 % in 13 %); or by the relative deviation
            pooled over rows, with its degrees of freedom, for few runs that deviate alike.

    Raises:
        ValueError: fewer batch sizes, fewer than two runs of one, or values that are not positive.
    """
    if len({row.batch_size for row in rows}) < 2:
        raise ValueError("a hyperbola needs two batch sizes or more")
    if wrong := [row for row in rows if row.runs < 2 or not (0 < row.mean < math.inf and 0 < row.deviation < math.inf)]:
        raise ValueError(f"batch size {wrong[0].batch_size:g}: needs two runs or more that took different, positive samples")
    relative = [row.deviation / row.mean for row in rows]
    degrees = _MANY
    if spread == "pooled":
        degrees = float(sum(row.runs - 1 for row in rows))
        pooled = math.sqrt(sum((row.runs - 1) * each**2 for row, each in zip(rows, relative, strict=True)) / degrees)
        relative = [pooled] * len(rows)
    weights = [row.runs / (each * row.mean) ** 2 for row, each in zip(rows, relative, strict=True)]
    line = _line([row.batch_size for row in rows], [row.mean for row in rows], weights)
    quantile = student_quantile(0.5 + 0.5 * confidence, degrees)
    critical = line.intercept / line.slope if line.slope > 0 else math.inf
    lower, upper, _ = fieller(
        line.intercept, line.slope, line.var_intercept, line.var_slope, line.covariance, quantile
    )
    half = quantile * math.sqrt(line.var_intercept)
    fitted = [line.intercept + line.slope * row.batch_size for row in rows]
    free = len(rows) - 2
    misfit = sum(w * (row.mean - fit) ** 2 for w, row, fit in zip(weights, rows, fitted, strict=True))
    p_value = math.nan
    if free:
        p_value = fisher_tail(misfit / free, free, degrees) if spread == "pooled" else chi_squared_tail(misfit, free)
    runs = sum(row.runs for row in rows)
    return Hyperbola(
        Interval(line.intercept, line.intercept - half, line.intercept + half, runs, confidence),
        Interval(critical, lower, upper, runs, confidence),
        tuple(row.mean / fit - 1.0 for row, fit in zip(rows, fitted, strict=True)),
        p_value,
    )


@dataclass(frozen=True)
class _Line:
    intercept: float
    slope: float
    var_intercept: float
    var_slope: float
    covariance: float


def _line(x: Sequence[float], y: Sequence[float], weights: Sequence[float]) -> _Line:
    """Weighted least squares about the mean of x, where both parameters are independent."""
    total = sum(weights)
    middle = sum(w * each for w, each in zip(weights, x, strict=True)) / total
    height = sum(w * each for w, each in zip(weights, y, strict=True)) / total
    spread = sum(w * (each - middle) ** 2 for w, each in zip(weights, x, strict=True))
    slope = sum(w * (u - middle) * (v - height) for w, u, v in zip(weights, x, y, strict=True)) / spread
    variance = 1.0 / spread
    return _Line(height - slope * middle, slope, 1.0 / total + middle**2 * variance, variance, -middle * variance)


def crossing(before: tuple[float, float], after: tuple[float, float], log_target: float) -> float:
    """Samples at which a learning curve crosses a target between two of its points: a line in ln loss over ln samples.

    Args:
        before, after: (samples, ln loss) of each, the target between them.
        log_target: ln loss.
    """
    share = (before[1] - log_target) / (before[1] - after[1])
    low, high = math.log(before[0]), math.log(after[0])
    return math.exp(low + share * (high - low))


class EdgeOfGrid(ValueError):
    """Optimum that is not known, as the best learning rate is the lowest or the highest one tried."""


@dataclass(frozen=True)
class BestRate:
    """Best learning rate of a batch size.

    Attributes:
        lr: with the least samples.
        samples: there.
        interpolated: false where a neighbour never reached the target, so that it is the best rate of the grid itself.
        of_grid: best rate of the grid.
    """

    lr: float
    samples: float
    interpolated: bool
    of_grid: float


def samples_at(samples: Mapping[float, float], best: float, lr: float) -> float:
    """Interpolate a run's samples to a learning rate by the parabola in ln lr through a rate of the grid and its neighbours.

    With `best` and `lr` of the mean over seeds, as `best_learning_rate` finds them, the mean of these values over seeds is its
    `samples`. All seeds are read at one common rate.

    Args:
        samples: of each learning rate of one seed, finite at the three.
        best: best rate of the grid, not its lowest nor its highest.
        lr: above 0.
    """
    rates = sorted(samples)
    place = rates.index(best)
    points = [(math.log(rate / best), samples[rate]) for rate in rates[place - 1 : place + 2]]
    x, total = math.log(lr / best), 0.0
    for at, value in points:
        others = [other for other, _ in points if other != at]
        total += value * math.prod((x - other) / (at - other) for other in others)
    return total


def best_learning_rate(samples: Mapping[float, float]) -> BestRate:
    """Interpolate samples to a target to the best learning rate: the lowest point of the parabola in ln lr through the best
    rate of a grid and its two neighbours.

    Args:
        samples: of each learning rate; infinite where the target was not reached.

    Raises:
        EdgeOfGrid: the best rate has no neighbour on one side.
        ValueError: no rate reached the target.
    """
    rates = sorted(samples)
    best = min(rates, key=lambda lr: samples[lr])
    if not math.isfinite(samples[best]):
        raise ValueError("no learning rate reached the target")
    place = rates.index(best)
    if place in (0, len(rates) - 1):
        side, wanted = ("lowest", "lower") if place == 0 else ("highest", "higher")
        raise EdgeOfGrid(f"the best learning rate, {best:g}, is the {side} of {len(rates)} tried (add {wanted} ones)")
    neighbours = [rates[place - 1], rates[place + 1]]
    if not all(math.isfinite(samples[lr]) for lr in neighbours):
        return BestRate(best, samples[best], False, best)
    (left, right), (rise_left, rise_right) = (
        [math.log(lr / best) for lr in neighbours], [samples[lr] - samples[best] for lr in neighbours]
    )  # fmt: skip
    # rise = c x^2 + d x through both neighbours
    curvature = (rise_right / right - rise_left / left) / (right - left)
    if curvature <= 0:  # all three alike
        return BestRate(best, samples[best], True, best)
    gradient = rise_left / left - curvature * left
    step = -gradient / (2 * curvature)
    return BestRate(best * math.exp(step), samples[best] - curvature * step**2, True, best)
