"""Statistics of a calibration: half-progress batches against noise scales over bins and ages, and the decision."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from torchtitan.experiments.cells import Row
from torchtitan.statistics.interval import Interval
from torchtitan.statistics.rank_correlation import spearman
from torchtitan_dit.studies.frame import number

# Column of the record -> geometry.
GEOMETRIES = {"b_g": "g", "b_g_v14": "g v^-1/4", "b_g_v12": "g v^-1/2"}
PRESENT = "b_g_v12"  # the headline so far
UPDATES = ("plain", "adam")
LEAST_RANK = 0.8
SLOPES = (0.75, 1.33)
MOST_RATIO = 1.5
MOST_LEFT_OUT = 0.1
_RESAMPLES = 4000
_TAIL = 0.025


def interval_columns(name: str) -> tuple[str, str, str]:
    """Columns of an estimate and the ends of its interval."""
    return name, f"{name}_lower", f"{name}_upper"


def interval_of(row: Row, name: str) -> Interval:
    """Interval in a row."""
    value, lower, upper = (number(row, column) for column in interval_columns(name))
    return Interval(value, lower, upper)


def usable(row: Row, update: str, estimate: str = "half") -> bool:
    """True if the half-progress batch of the update and every noise scale are bounded and positive."""
    names = (f"{update}_{estimate}", *GEOMETRIES)
    return row["status"] == "ok" and all(
        found.bounded and found.lower > 0 for found in (interval_of(row, name) for name in names)
    )


@dataclass(frozen=True)
class Finding:
    """Agreement of a noise scale with the half-progress batch over cells.

    Attributes:
        slope: of ln B_half on ln B.
        ratio: geometric mean of B_half / B.
        rank: Spearman's correlation.
        scatter: standard deviation of ln (B_half / B) over cells.
        single: ratio of a single cell: the geometric mean with the 2.5 and 97.5 percentiles over cells.
    """

    slope: Interval
    ratio: Interval
    rank: Interval
    scatter: Interval
    single: Interval


@dataclass(frozen=True)
class Agreement:
    """Agreement of one update's half-progress batches with every geometry's noise scale.

    Attributes:
        together: geometry -> finding over all data sets.
        apart: data set -> geometry -> finding.
        scatter_differences: geometry -> its scatter less that of the present headline.
        ratio_spread: geometry -> largest quotient of two data sets' ratios; lower end 1 at least.
        cells, left_out: numbers of cells, and of those that are not usable.
    """

    together: dict[str, Finding]
    apart: dict[str, dict[str, Finding]]
    scatter_differences: dict[str, Interval]
    ratio_spread: dict[str, Interval]
    cells: int
    left_out: int


def agreement(rows: Sequence[Row], update: str, estimate: str = "half", seed: int = 0) -> Agreement | None:
    """Agreement over the usable rows; None with fewer than three of them in a data set.

    Intervals are percentiles of resamples: ages within each data set, then bins within each age, with replacement.
    """
    used = [row for row in rows if usable(row, update, estimate)]
    data = list(dict.fromkeys(row["data"] for row in used))
    places = {name: [place for place, row in enumerate(used) if row["data"] == name] for name in data}
    if not used or min(map(len, places.values())) < 3:
        return None
    counts = np.concatenate((np.ones((1, len(used))), resampled(used, seed)))  # the estimate, then resamples
    half = np.log([interval_of(row, f"{update}_{estimate}").value for row in used])
    scale = {name: np.log([interval_of(row, name).value for row in used]) for name in GEOMETRIES}
    together = {name: _finding(scale[name], half, counts) for name in GEOMETRIES}
    apart = {
        of: {name: _finding(scale[name][chosen], half[chosen], counts[:, chosen]) for name in GEOMETRIES}
        for of, chosen in places.items()
    }
    scatters = {name: _scatter(half - scale[name], counts) for name in GEOMETRIES}
    differences = {name: percentile_interval(scatters[name] - scatters[PRESENT]) for name in GEOMETRIES}
    spread = {}
    for name in GEOMETRIES:
        means = np.stack([_mean((half - scale[name])[chosen], counts[:, chosen]) for chosen in places.values()])
        spread[name] = percentile_interval(np.exp(means.max(0) - means.min(0)))
    return Agreement(together, apart, differences, spread, len(rows), len(rows) - len(used))


def calibrated(found: Agreement, geometry: str) -> bool:
    """True if the geometry's noise scale predicts the half-progress batch, by the criteria of docs/critical_batch.md."""
    whole = found.together[geometry]
    ranks = whole.rank.lower >= LEAST_RANK and all(of[geometry].rank.value >= LEAST_RANK for of in found.apart.values())
    slope = SLOPES[0] <= whole.slope.lower and whole.slope.upper <= SLOPES[1]
    ratio = whole.ratio
    narrow = ratio.upper <= MOST_RATIO * ratio.value and ratio.value <= MOST_RATIO * ratio.lower
    return ranks and slope and narrow and found.ratio_spread[geometry].value <= MOST_RATIO


def refuted(found: Agreement, geometry: str) -> bool:
    """True if the noise scale does not predict the half-progress batch, by the criteria of docs/critical_batch.md."""
    whole, spread = found.together[geometry], found.ratio_spread[geometry]
    outside = whole.slope.upper < SLOPES[0] or whole.slope.lower > SLOPES[1]
    return whole.rank.upper < LEAST_RANK or outside or spread.lower > MOST_RATIO


def headline(found: Agreement) -> str | None:
    """Headline geometry of an update by the decision rule; None where no geometry is calibrated."""
    passed = [name for name in GEOMETRIES if calibrated(found, name)]
    if not passed:
        return None
    best = min(passed, key=lambda name: found.together[name].scatter.value)
    if PRESENT in passed and not found.scatter_differences[best].excludes(0.0):
        return PRESENT
    return best


def enough(found: Agreement) -> bool:
    """True if few enough cells are left out for a verdict."""
    return found.left_out <= MOST_LEFT_OUT * found.cells


def resampled(rows: Sequence[Row], seed: int) -> np.ndarray:
    """Number of times each row is drawn in every resample, [resamples, rows]: ages within each data set, then bins."""
    generator = np.random.default_rng(seed)
    counts = np.zeros((_RESAMPLES, len(rows)))
    clusters: dict[str, dict[str, list[int]]] = {}
    for place, row in enumerate(rows):
        clusters.setdefault(row["data"], {}).setdefault(row["step"], []).append(place)
    for ages in clusters.values():
        times = generator.multinomial(len(ages), np.full(len(ages), 1 / len(ages)), size=_RESAMPLES)
        for drawn, places in zip(times.T, ages.values(), strict=True):
            # As many draws of bins as the age has, each time that it is drawn.
            counts[:, places] = generator.multinomial(drawn * len(places), np.full(len(places), 1 / len(places)))
    return counts


def _finding(scale: np.ndarray, half: np.ndarray, counts: np.ndarray) -> Finding:
    ratio = half - scale
    dx, dy = scale - _mean(scale, counts)[:, None], half - _mean(half, counts)[:, None]
    with np.errstate(invalid="ignore", divide="ignore"):
        slope = _mean(dx * dy, counts) / _mean(dx * dx, counts)
    lower, upper = np.quantile(ratio, [_TAIL, 1 - _TAIL])
    means = np.exp(_mean(ratio, counts))
    single = Interval(float(means[0]), math.exp(lower), math.exp(upper), len(ratio), 1 - 2 * _TAIL)
    spread = percentile_interval(_scatter(ratio, counts))
    rank = percentile_interval(spearman(scale, half, counts))
    return Finding(percentile_interval(slope), percentile_interval(means), rank, spread, single)


def _scatter(values: np.ndarray, counts: np.ndarray) -> np.ndarray:
    return np.sqrt(_mean((values - _mean(values, counts)[:, None]) ** 2, counts))


def _mean(values: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Mean of values [n] or [resamples, n], NaN where nothing is drawn."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return (counts * values).sum(-1) / counts.sum(-1)


def percentile_interval(values: np.ndarray) -> Interval:
    """Percentile interval of the resamples after the first value, the estimate."""
    lower, upper = np.nanquantile(values[1:], [_TAIL, 1 - _TAIL])
    return Interval(float(values[0]), float(lower), float(upper), len(values) - 1, 1 - 2 * _TAIL)
