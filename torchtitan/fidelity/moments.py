"""Mean and covariance of feature vectors, accumulated in float64 from batches."""

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

    def __post_init__(self) -> None:
        if self.mean.ndim != 1 or self.covariance.shape != self.mean.shape * 2:
            raise EvaluationError(f"a mean {list(self.mean.shape)} and a covariance {list(self.covariance.shape)} do not fit")
        if not (np.isfinite(self.mean).all() and np.isfinite(self.covariance).all()):
            raise EvaluationError("a mean or a covariance has values that are not finite")

    @property
    def dim(self) -> int:
        return len(self.mean)


class MomentsAccumulator:
    """Running mean and sum of squared deviations of rows that arrive in batches or as moments of parts.

    Batches are centred on their own mean, and joined by Chan's formula for the moments of a union. Sums of x and x xᵀ
    would cancel where a mean is large against its deviation, and sums about a common shift would need one that all ranks
    agree on before the first batch. The formula is exact but for rounding: the same parts joined in the same order give
    the same bits, and other divisions of the same rows agree to about 1e-15 of the covariance's scale.

    Args:
        dim: size D of a row.

    Source: Chan, Golub and LeVeque 1983, "Algorithms for computing the sample variance", equation 2.1.
    """

    def __init__(self, dim: int) -> None:
        self.count = 0
        self._mean = np.zeros(dim)
        self._scatter = np.zeros((dim, dim))  # sum of (x - mean) (x - mean)ᵀ

    def add(self, rows: np.ndarray) -> None:
        """Add feature vectors [N, D] of any floating type.

        Raises:
            EvaluationError: the size of a row is another, or a value is not finite.
        """
        check_rows("features", rows)
        if rows.shape[1] != len(self._mean):
            raise EvaluationError(f"features of {rows.shape[1]} dimensions in a set of {len(self._mean)}")
        for first in range(0, len(rows), _ROWS_AT_ONCE):
            part = np.asarray(rows[first : first + _ROWS_AT_ONCE], dtype=np.float64)
            mean = part.mean(axis=0)
            part = part - mean
            self._join(len(part), mean, part.T @ part)

    def merge(self, part: Moments) -> None:
        """Add the rows behind the moments of a part."""
        self._join(_known_count(part), part.mean, part.covariance * (_known_count(part) - 1))

    def moments(self) -> Moments:
        """Moments of all rows so far.

        Raises:
            EvaluationError: fewer than two rows.
        """
        if self.count < 2:
            raise EvaluationError(f"{self.count} feature vectors have no covariance: at least 2 are needed")
        return Moments(self.count, self._mean.copy(), self._scatter / (self.count - 1))

    def _join(self, count: int, mean: np.ndarray, scatter: np.ndarray) -> None:
        if not count:
            return
        total = self.count + count
        difference = mean - self._mean
        self._scatter += scatter
        self._scatter += np.outer(difference, difference * (self.count * count / total))
        self._mean += difference * (count / total)
        self.count = total


def moments_of_rows(rows: np.ndarray, weights: np.ndarray | None = None) -> Moments:
    """Moments of feature vectors [N, D], N >= 2, each with a weight > 0 [N]; default: equal weights.

    Raises:
        EvaluationError: fewer than two rows, or a value that is not finite.
    """
    check_rows("features", rows)
    if weights is None or len(rows) < 2:
        accumulator = MomentsAccumulator(rows.shape[1])
        accumulator.add(rows)
        return accumulator.moments()
    weights = weights / weights.sum()
    mean = weights @ rows
    deviations = rows - mean
    return Moments(len(rows), mean, (deviations * weights[:, None]).T @ deviations / (1 - np.square(weights).sum()))


def merged_moments(parts: Iterable[Moments]) -> Moments:
    """Moments of the union of disjoint sets, at least one, joined in the order given."""
    accumulator = None
    for part in parts:
        accumulator = accumulator or MomentsAccumulator(part.dim)
        accumulator.merge(part)
    if accumulator is None:
        raise EvaluationError("no moments to merge")
    return accumulator.moments()


def moments_without(whole: Moments, part: Moments) -> Moments:
    """Moments of the rows of `whole` that are not behind `part`, which is one of its disjoint sets."""
    count, removed = _known_count(whole), _known_count(part)
    left = count - removed
    if left < 2:
        raise EvaluationError(f"without {removed} of {count} feature vectors, fewer than 2 are left")
    mean = (whole.mean * count - part.mean * removed) / left
    difference = mean - part.mean
    scatter = whole.covariance * (count - 1) - part.covariance * (removed - 1)
    scatter -= np.outer(difference, difference * (left * removed / count))
    return Moments(left, mean, scatter / (left - 1))


def check_rows(what: str, rows: np.ndarray) -> None:
    """Refuse what is not a table of finite feature vectors.

    Raises:
        EvaluationError: not two-dimensional, or a row has values that are not finite.
    """
    if rows.ndim != 2 or not rows.shape[1]:
        raise EvaluationError(f"{what}: expected rows [N, D], got shape {list(rows.shape)}")
    damaged = 0
    for first in range(0, len(rows), _ROWS_AT_ONCE):
        damaged += int((~np.isfinite(rows[first : first + _ROWS_AT_ONCE]).all(axis=1)).sum())
    if damaged:
        raise EvaluationError(f"{what}: {damaged} of {len(rows)} feature vectors have values that are not finite")


def _known_count(moments: Moments) -> int:
    if moments.count is None:
        raise EvaluationError("moments of an unknown number of images cannot be merged with others")
    return moments.count
