"""Disjoint sets of samples: assignment, moments of each, and intervals by the jackknife over them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from torchtitan.fidelity.errors import FidelityError
from torchtitan.fidelity.moments import Moments, MomentsAccumulator
from torchtitan.statistics.interval import Interval
from torchtitan.statistics.student import student_quantile

SETS = 10


def set_numbers(count: int, sets: int, seed: int = 0) -> np.ndarray:
    """Assign samples to disjoint sets at random, so that samples in order of class leave the sets alike.

    Args:
        count: of samples.
        sets: number of sets K, whose sizes differ by one at most.
        seed: of numpy's PCG64.

    Returns:
        number of each sample's set, integers in [0, K), [count].

    Raises:
        FidelityError: a set would have fewer than two samples.
    """
    if sets < 1 or count < 2 * sets:
        raise FidelityError(f"{count} samples do not make {sets} disjoint sets of at least 2")
    return np.random.default_rng(seed).permutation(np.arange(count) % sets)


class MomentsOfSets:
    """Moments of each of K disjoint sets of samples, accumulated from batches in the samples' order.

    Args:
        dim: size D of a row. Each set takes D² float64 numbers.
        count: of samples in all.
        sets, seed: of `set_numbers`.
    """

    def __init__(self, dim: int, count: int, sets: int = SETS, seed: int = 0) -> None:
        self._numbers = set_numbers(count, sets, seed)
        self._sets = [MomentsAccumulator(dim) for _ in range(sets)]
        self._added = 0

    def add(self, rows: np.ndarray) -> None:
        """Add the next samples' rows [B, D]."""
        numbers = self._numbers[self._added : self._added + len(rows)]
        if len(numbers) < len(rows):
            raise FidelityError(f"more than {len(self._numbers)} rows in a set of that many samples")
        for number, accumulator in enumerate(self._sets):
            accumulator.add(rows[numbers == number])
        self._added += len(rows)

    def moments(self) -> tuple[Moments, ...]:
        """Moments of each set, once all samples have been added."""
        if self._added < len(self._numbers):
            raise FidelityError(f"{self._added} of {len(self._numbers)} samples have been added")
        return tuple(accumulator.moments() for accumulator in self._sets)


def jackknife_interval(value: float, without_each: Sequence[float], confidence: float = 0.95) -> Interval:
    """Student's interval of a statistic by the delete-a-group jackknife over K disjoint sets of about one size.

    The variance is (K - 1) / K times the sum of squared deviations of the K values; there are K - 1 degrees of freedom.
    It is the statistic's spread from set of samples to set of samples of this size. A bias of the statistic, such as
    that of a Fréchet distance at finite N, is not in it.

    Args:
        value: of all samples.
        without_each: value without each of the K sets, K >= 2; with fewer, the result has no ends.
        confidence: of the interval, in (0, 1).

    Source: Kott 2001, "The delete-a-group jackknife", Journal of Official Statistics 17.
    """
    count = len(without_each)
    if count < 2:
        return Interval(value, count=count)
    half = student_quantile(0.5 + 0.5 * confidence, count - 1.0) * math.sqrt((count - 1) * float(np.var(without_each)))
    return Interval(value, value - half, value + half, count, confidence)
