"""Fréchet distance between sets of feature vectors, each taken as a Gaussian."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import numpy as np

from torchtitan.errors import EvaluationError
from torchtitan.fidelity.feature_set import FeatureSet
from torchtitan.fidelity.measurement import Measurement, Metric, Options
from torchtitan.fidelity.moments import Moments, merged_moments, moments_of_rows, moments_without
from torchtitan.statistics.interval import Interval
from torchtitan.statistics.student import student_quantile

GROUPS = 10  # of the jackknife


class FrechetReference:
    """Reference set with the root of its covariance, for the distances of many sets from it.

    The trace of (A B)^(1/2) is taken from the eigenvalues of B^(1/2) A B^(1/2), which is symmetric: no complex
    intermediate, and singular covariances stay finite. Only as many eigenvalues count as the rank can be, by the numbers
    of rows and of features that vary, since the root of an eigenvalue's rounding error is not small.
    """

    def __init__(self, reference: Moments) -> None:
        self.moments = reference
        eigenvalues, vectors = np.linalg.eigh(reference.covariance)
        self._root = (vectors * np.sqrt(eigenvalues.clip(min=0))) @ vectors.T  # [D, D]
        self._rank = _largest_rank(reference)

    def distance(self, samples: Moments) -> float:
        """Fréchet distance |mean_a - mean_b|² + tr(A + B - 2 (A B)^(1/2)) of two Gaussians with covariances A and B, >= 0.

        Its estimate from samples is too high, by an amount that falls about as 1/N, so two distances can be compared only
        where the sets have the same sizes. Raises EvaluationError: the features differ in size.

        Source: Heusel et al. 2017, "GANs Trained by a Two Time-Scale Update Rule Converge to a Local Nash
        Equilibrium", equation 6.
        """
        if samples.dim != self.moments.dim:
            raise EvaluationError(f"samples have {samples.dim} features and the reference has {self.moments.dim}")
        eigenvalues = np.linalg.eigvalsh(self._root @ samples.covariance @ self._root)  # ascending
        rank = min(self._rank, _largest_rank(samples))
        trace_of_root = np.sqrt(eigenvalues[len(eigenvalues) - rank :].clip(min=0)).sum()
        distance = np.square(samples.mean - self.moments.mean).sum()
        distance += np.trace(samples.covariance) + np.trace(self.moments.covariance) - 2 * trace_of_root
        return max(0.0, float(distance))  # rounding may leave equal Gaussians a little below 0


def measure_frechet(
    name: str, samples: FeatureSet, reference: FeatureSet | None, output: str, options: Options
) -> Measurement:
    """Fréchet distance of samples from a reference, as FID is, with its interval by the delete-a-group jackknife.

    The interval is the spread over sets of as many samples, with the reference fixed. The bias of the distance at this
    number of samples is not in it, nor are another reference or another training run.
    """
    assert reference is not None
    rows = samples.rows_of(output)
    groups = [moments_of_rows(rows[numbers]) for numbers in _groups(len(rows), options.seed)]
    whole = merged_moments(groups)
    ends, notes = FrechetReference(reference.moments_of(output)), []
    for each, moments in ((reference, ends.moments), (samples, whole)):
        if moments.count is not None and moments.count <= moments.dim:
            notes.append(
                f"{each.name}: a covariance of {moments.dim} features from {moments.count} images has rank {moments.count - 1} "
                "at most; the distance compares only with one of as many images"
            )
    without_each = [ends.distance(moments_without(whole, group)) for group in groups]
    return Measurement({name: jackknife_interval(ends.distance(whole), without_each, options.confidence)}, notes)


def jackknife_interval(value: float, without_each: Sequence[float], confidence: float = 0.95) -> Interval:
    """Student's interval of a statistic by the delete-a-group jackknife over K disjoint groups of about one size.

    The variance is (K - 1) / K times the sum of squared deviations of the K values; there are K - 1 degrees of freedom.
    It is the statistic's spread from set of samples to set of samples of this size. A bias of the statistic, such as
    that of a Fréchet distance at finite N, is not in it.

    Args:
        without_each: value without each of the K groups, K >= 2; with fewer, the result has no ends.

    Source: Kott 2001, "The delete-a-group jackknife", Journal of Official Statistics 17.
    """
    count = len(without_each)
    if count < 2:
        return Interval(value, count=count)
    half = student_quantile(0.5 + 0.5 * confidence, count - 1.0) * math.sqrt((count - 1) * float(np.var(without_each)))
    return Interval(value, value - half, value + half, count, confidence)


def _largest_rank(moments: Moments) -> int:
    varying = int(np.count_nonzero(np.diag(moments.covariance)))
    return varying if moments.count is None else min(varying, moments.count - 1)


def _groups(count: int, seed: int) -> list[np.ndarray]:
    """Numbers of the samples in each group, drawn at random, so that samples in order of class leave the groups alike."""
    groups = min(GROUPS, count // 2)
    group_of = np.random.default_rng(seed).permutation(np.arange(count) % groups)
    return [np.flatnonzero(group_of == group) for group in range(groups)]


def _metric(title: str, name: str, output: str, extractor: str | None = None) -> Metric:
    return Metric(title, output, "moments", {name: "lower"}, partial(measure_frechet, name), extractor)


FID = _metric("FID", "fid", "pooled", "inception")
SFID = _metric("sFID", "sfid", "spatial", "inception")
FD_DINOV2 = _metric("FD-DINOv2", "fd_dinov2", "pooled", "dinov2")
FD = _metric("Fréchet distance", "fd", "pooled")
