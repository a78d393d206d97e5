"""Statistics of noise scales along a training: checkpoints and windows against the log, swings, cosines by lag."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from torchtitan.experiments.cells import Row
from torchtitan.statistics.interval import Interval
from torchtitan.statistics.student import student_quantile
from torchtitan_dit.studies.gns_calibration_statistics import interval_of, percentile_interval, resampled
from torchtitan_dit.studies.gradient_lags import BLOCKS
from torchtitan_dit.studies.records import numbers_of

LEAST_LAG, MOST_COSINE = 8, 0.5
_DRAWS = 2000


def frozen(row: Row) -> Interval:
    """Noise scale of the age's own checkpoint."""
    value, lower, upper = (numbers_of(row, name)[-1] for name in ("b", "b_lower", "b_upper"))
    return Interval(value, lower, upper)


def window(row: Row) -> Interval:
    """Noise scale of all checkpoints of the window together."""
    return interval_of(row, "window")


def logged(row: Row) -> Interval:
    """Noise scale that the run logged at the age; NaN where it logged none."""
    return interval_of(row, "logged")


@dataclass(frozen=True)
class Finding:
    """Comparison of checkpoints and windows with the log over cells.

    Attributes:
        frozen, window: geometric mean ratio of the value to the logged one.
        frozen_ratios, window_ratios: of the cells in which both are bounded.
        swings: number of cells in which the ratio of largest to smallest frozen value exceeds the 97.5 percentile of the same
            ratio under sampling errors alone.
        swing_cells: cells with two bounded checkpoints and a bounded window.
        cells: all of them.
    """

    frozen: Interval
    window: Interval
    frozen_ratios: list[float]
    window_ratios: list[float]
    swings: int
    swing_cells: int
    cells: int


def finding(rows: Sequence[Row], seed: int = 0) -> Finding:
    """Comparison with 95 % percentiles of resamples: ages, then bins within each age, with replacement."""
    counts = np.concatenate((np.ones((1, len(rows))), resampled(rows, seed)))
    of_frozen, of_window = (np.array([_log_ratio(of(row), logged(row)) for row in rows]) for of in (frozen, window))
    generator = np.random.default_rng(seed)
    swings = [swing for row in rows if (swing := _swing(row, generator)) is not None]
    return Finding(
        _geometric_mean(of_frozen, counts), _geometric_mean(of_window, counts), _known(of_frozen), _known(of_window),
        sum(measured > chance for measured, chance in swings), len(swings), len(rows),
    )  # fmt: skip


def averaging_closer(rows: Sequence[Row]) -> tuple[int, int]:
    """Cells in which the window's value is closer to the logged one than the checkpoint's, and cells with all three."""
    pairs = [(_log_ratio(window(row), logged(row)), _log_ratio(frozen(row), logged(row))) for row in rows]
    known = [(abs(one), abs(other)) for one, other in pairs if not math.isnan(one + other)]
    return sum(one < other for one, other in known), len(known)


def cosine_means(rows: Sequence[Row], seed: int = 0) -> dict[int, Interval]:
    """Mean over cells of the cosine at each lag, of those where it is known."""
    counts = np.concatenate((np.ones((1, len(rows))), resampled(rows, seed)))
    lags = [int(lag) for lag in numbers_of(rows[0], "lags")]
    values = np.array([numbers_of(row, "cosines") for row in rows])
    return {lag: percentile_interval(_mean(values[:, place], counts)) for place, lag in enumerate(lags)}


def explained(rows: Sequence[Row], whole: Finding) -> tuple[bool, bool, bool]:
    """Criteria (a), (b) and (c) of docs/critical_batch.md: swings, turns of the gradient, averaging."""
    closer, both = averaging_closer(rows)
    means = [found for lag, found in cosine_means(rows).items() if lag >= LEAST_LAG]
    return (
        2 * whole.swings >= whole.swing_cells > 0,
        bool(means) and all(found.upper < MOST_COSINE for found in means),
        2 * closer > both,
    )


def _known(values: np.ndarray) -> list[float]:
    return [math.exp(value) for value in values if not math.isnan(value)]


def _log_ratio(value: Interval, reference: Interval) -> float:
    known = all(one.bounded and one.lower > 0 for one in (value, reference))
    return math.log(value.value / reference.value) if known else math.nan


def _swing(row: Row, generator: np.random.Generator) -> tuple[float, float] | None:
    """Largest by smallest bounded value of the checkpoints, and the 97.5 percentile of the same without any swing."""
    values, lower, upper = (np.array(numbers_of(row, name)) for name in ("b", "b_lower", "b_upper"))
    known = (lower > 0) & np.isfinite(upper)
    if known.sum() < 2 or not window(row).bounded:
        return None
    errors = np.log(upper[known] / lower[known]) / (2 * student_quantile(0.975, BLOCKS - 1.0))
    drawn = generator.normal(size=(_DRAWS, int(known.sum()))) * errors
    chance = np.exp(np.quantile(drawn.max(1) - drawn.min(1), 0.975))
    return float(values[known].max() / values[known].min()), float(chance)


def _geometric_mean(values: np.ndarray, counts: np.ndarray) -> Interval:
    if np.isnan(values).all():
        return Interval(math.nan, math.nan, math.nan, 0)
    return percentile_interval(np.exp(_mean(values, counts)))


def _mean(values: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Mean of the known values [n] for draws [resamples, n]; NaN where none is drawn."""
    known = ~np.isnan(values)
    with np.errstate(invalid="ignore", divide="ignore"):
        return counts[:, known] @ values[known] / counts[:, known].sum(1)

