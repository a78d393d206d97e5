"""Statistics of a calibration: half-progress batches against noise scales over bins and ages."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from research.cells import Row
from research.frame import number
from research.rank_correlation import drawn_mean, spearman
from torchtitan.statistics.interval import Interval

# Column of the record -> geometry.
GEOMETRIES = {"b_g": "g", "b_g_v14": "g v^-1/4", "b_g_v12": "g v^-1/2"}
UPDATES = ("plain", "adam")
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
        cells, left_out: numbers of cells, and of those that are not usable.
    """

    together: dict[str, Finding]
    apart: dict[str, dict[str, Finding]]
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
    together = {name: finding(scale[name], half, counts) for name in GEOMETRIES}
    apart = {
        of: {name: finding(scale[name][chosen], half[chosen], counts[:, chosen]) for name in GEOMETRIES}
        for of, chosen in places.items()
    }
    return Agreement(together, apart, len(rows), len(rows) - len(used))


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


def finding(scale: np.ndarray, half: np.ndarray, counts: np.ndarray) -> Finding:
    """Agreement of ln B and ln B_half of cells [n], drawn counts [1 + resamples, n] times."""
    ratio = half - scale
    dx, dy = scale - drawn_mean(scale, counts)[:, None], half - drawn_mean(half, counts)[:, None]
    with np.errstate(invalid="ignore", divide="ignore"):
        slope = drawn_mean(dx * dy, counts) / drawn_mean(dx * dx, counts)
    lower, upper = np.quantile(ratio, [_TAIL, 1 - _TAIL])
    means = np.exp(drawn_mean(ratio, counts))
    single = Interval(float(means[0]), math.exp(lower), math.exp(upper), len(ratio), 1 - 2 * _TAIL)
    spread = percentile_interval(_scatter(ratio, counts))
    rank = percentile_interval(spearman(scale, half, counts))
    return Finding(percentile_interval(slope), percentile_interval(means), rank, spread, single)


def _scatter(values: np.ndarray, counts: np.ndarray) -> np.ndarray:
    return np.sqrt(drawn_mean((values - drawn_mean(values, counts)[:, None]) ** 2, counts))


def percentile_interval(values: np.ndarray) -> Interval:
    """Percentile interval of the resamples after the first value, the estimate."""
    lower, upper = np.nanquantile(values[1:], [_TAIL, 1 - _TAIL])
    return Interval(float(values[0]), float(lower), float(upper), len(values) - 1, 1 - 2 * _TAIL)
