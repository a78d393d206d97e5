"""Mean and covariance of feature vectors, in float64."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from torchtitan.errors import EvaluationError

_ROWS_AT_ONCE = 4096  # converted to float64 together


@dataclass(frozen=True)
class Moments:
    """Mean and unbiased covariance of a set of feature vectors.

    Attributes:
        count: rows behind them; None where a published file does not say.
        mean: float64 [D].
        covariance: float64 [D, D], divided by count - 1.
    """

    count: int | None
    mean: np.ndarray
    covariance: np.ndarray

    @property
    def dim(self) -> int:
        return len(self.mean)


def moments_of_rows(rows: np.ndarray) -> Moments:
    """Moments of rows [N, D]. Raises EvaluationError: N < 2, or a value is not finite."""
    check_rows("features", rows)
    if len(rows) < 2:
        raise EvaluationError(f"{len(rows)} feature vectors have no covariance: at least 2 are needed")
    return merged_moments(_of_part(rows[first : first + _ROWS_AT_ONCE]) for first in range(0, len(rows), _ROWS_AT_ONCE))


def merged_moments(parts: Iterable[Moments]) -> Moments:
    """Moments of the union of disjoint sets, at least one, of known numbers of rows.

    Sums of x and x xᵀ would cancel where a mean is large against its deviation; this is exact but for rounding.

    Source: Chan, Golub and LeVeque 1983, "Algorithms for computing the sample variance", equation 2.1.
    """
    total, mean, scatter = 0, np.zeros(1), np.zeros(1)  # scatter: sum of (x - mean) (x - mean)ᵀ
    for part in parts:
        count = _count(part)
        if not total:
            total, mean, scatter = count, part.mean, part.covariance * (count - 1)
            continue
        difference = part.mean - mean
        scatter += part.covariance * (count - 1)
        scatter += np.outer(difference, difference * (total * count / (total + count)))
        total += count
        mean = mean + difference * (count / total)
    return Moments(total, mean, scatter / (total - 1))


def moments_without(whole: Moments, part: Moments) -> Moments:
    """Moments of the rows of `whole` that are not behind `part`, which is one of its disjoint sets."""
    count, removed = _count(whole), _count(part)
    left = count - removed
    mean = (whole.mean * count - part.mean * removed) / left
    difference = mean - part.mean
    scatter = whole.covariance * (count - 1) - part.covariance * (removed - 1)
    scatter -= np.outer(difference, difference * (left * removed / count))
    return Moments(left, mean, scatter / (left - 1))


def check_rows(what: str, rows: np.ndarray) -> None:
    """Check that all feature vectors are finite. Raises EvaluationError."""
    damaged = 0
    for first in range(0, len(rows), _ROWS_AT_ONCE):
        damaged += int((~np.isfinite(rows[first : first + _ROWS_AT_ONCE]).all(axis=1)).sum())
    if damaged:
        raise EvaluationError(f"{what}: {damaged} of {len(rows)} feature vectors have values that are not finite")


def _of_part(rows: np.ndarray) -> Moments:
    rows = np.asarray(rows, dtype=np.float64)
    mean = rows.mean(axis=0)
    rows = rows - mean
    return Moments(len(rows), mean, rows.T @ rows / max(len(rows) - 1, 1))


def _count(moments: Moments) -> int:
    assert moments.count is not None  # a published file's moments are never merged
    return moments.count
