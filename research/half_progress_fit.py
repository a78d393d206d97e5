"""Half-progress batch of measured progress by batch size: hyperbola, interpolation, and intervals by the bootstrap."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from research.half_progress import Progress
from torchtitan.statistics.interval import Interval

CONFIDENCE = 0.95
_RESAMPLES = 2000
_LIMITS = (1e-2, 1e6)  # of the half-progress batch; an end outside is unbounded
_POINTS = 921  # of the logarithmic grid that is searched: 2 % apart, refined by a parabola
_LEAST_ERROR = 0.01  # of a progress, as a share: no batch size decides alone


@dataclass(frozen=True)
class HalfProgress:
    """Half-progress batch, by both estimates.

    Attributes:
        hyperbola: of progress(B) = best / (1 + B_half / B).
        interpolated: where progress, linear in ln B, is half of the full gradient's.
        best: the hyperbola's progress at B = infinity.
    """

    hyperbola: Interval
    interpolated: Interval
    best: float


def half_progress(batches: Sequence[int], full: int, progress: Progress, seed: int) -> HalfProgress:
    """Half-progress batch with 95 % intervals from resampled replicates and blocks of the full gradient; an end of 0 or infinity
    is unbounded.

    Args:
        batches: sizes, rising.
        full: samples of the full gradient.
        progress: measured.
        seed: of the resamples.
    """
    sizes, values, of_blocks = np.array([*batches, full], dtype=float), progress.values.numpy(), progress.of_blocks.numpy()
    count = len(values)
    generator = np.random.default_rng(seed)
    chosen = generator.integers(count, size=(_RESAMPLES, count))
    chosen_blocks = generator.integers(len(of_blocks), size=(_RESAMPLES, len(of_blocks)))
    means = np.concatenate((values.mean(0)[None], values[chosen].mean(1)))  # [1 + resamples, batches + 1]
    means[1:, -1] += of_blocks[chosen_blocks].mean(1)
    errors = values.std(0, ddof=1) / np.sqrt(count)
    errors[-1] = np.hypot(errors[-1], of_blocks.std(ddof=1) / np.sqrt(len(of_blocks)))
    halves, best = _fit_hyperbola(sizes, means, 1.0 / (errors**2 + (_LEAST_ERROR * means[0]) ** 2))
    crossings = np.array([_crossing(sizes, row) for row in means])
    return HalfProgress(_interval(halves, _LIMITS), _interval(crossings, (sizes[0], sizes[-1])), float(best[0]))


def _fit_hyperbola(sizes: np.ndarray, means: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Fit by weighted least squares: B_half and best of every row of means [N, K]; 0 or infinity outside of the limits."""
    grid = np.linspace(math.log(_LIMITS[0]), math.log(_LIMITS[1]), _POINTS)
    shapes = 1.0 / (1.0 + np.exp(grid)[:, None] / sizes)  # [points, K]
    products = np.maximum((means * weights) @ shapes.T, 0.0)  # best > 0
    gains = products**2 / (shapes**2 @ weights)  # squares explained, [N, points]
    place = gains.argmax(1)
    inside = (place > 0) & (place < _POINTS - 1)
    rows, middle = np.arange(len(means)), np.clip(place, 1, _POINTS - 2)
    below, at, above = (gains[rows, middle + shift] for shift in (-1, 0, 1))
    bend = 2 * at - below - above
    shift = np.divide(0.5 * (above - below), bend, out=np.zeros_like(bend), where=inside & (bend > 0))
    halves = np.exp(grid[middle] + shift * (grid[1] - grid[0]))
    halves = np.where(inside, halves, np.where(place == 0, 0.0, np.inf))
    halves = np.where(gains.max(1) > 0, halves, np.nan)
    fitted = 1.0 / (1.0 + np.where(inside, halves, 1.0)[:, None] / sizes)
    best = (means * weights * fitted).sum(1) / (weights * fitted**2).sum(1)
    return halves, np.where(inside, best, np.nan)


def _crossing(sizes: np.ndarray, means: np.ndarray) -> float:
    """Largest batch size where progress crosses half of the last one's, linear in ln B; 0 where none is below."""
    half = 0.5 * means[-1]
    below = np.flatnonzero(means[:-1] < half)
    if not half > 0 or not len(below):
        return 0.0 if half > 0 else np.nan
    low = below[-1]
    share = (half - means[low]) / (means[low + 1] - means[low])
    return float(np.exp(np.log(sizes[low]) + share * np.log(sizes[low + 1] / sizes[low])))


def _interval(values: np.ndarray, limits: tuple[float, float]) -> Interval:
    """Percentile interval of the resamples after the first value, the estimate; unbounded where one of them is not known."""
    resampled = values[1:]
    tail = 0.5 - 0.5 * CONFIDENCE
    if np.isnan(resampled).mean() > tail:
        return Interval(float(values[0]), 0.0, np.inf, len(resampled), CONFIDENCE)
    ordered = np.sort(resampled[~np.isnan(resampled)])
    lower, upper = (float(np.quantile(ordered, share, method="nearest")) for share in (tail, 1 - tail))
    lower = min(lower, limits[1]) if lower > limits[0] else 0.0
    upper = max(upper, limits[0]) if upper < limits[1] else np.inf
    return Interval(float(values[0]), lower, upper, len(resampled), CONFIDENCE)
