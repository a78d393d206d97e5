"""Fréchet distance extrapolated to infinitely many samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from torchtitan.fidelity.disjoint_sets import jackknife_interval
from torchtitan.fidelity.errors import FidelityError
from torchtitan.fidelity.feature_set import FeatureSet
from torchtitan.fidelity.frechet import FrechetReference, too_small
from torchtitan.fidelity.measurement import Measurement, Options
from torchtitan.fidelity.moments import Moments, merged_moments, moments_without

_FEWEST_SIZES = 3


def measure_fd_infinity(
    samples: FeatureSet, reference: FeatureSet | None, output: str, options: Options
) -> Measurement:
    """Fréchet distance at 1/N = 0 on a line fitted to those of subsets of N samples.

    The bias of the distance falls about as 1/N. Of K disjoint sets, neighbours are joined to subsets of 1, 2, 5 and 10
    sets (all divisors of K); the distances of one size are averaged, so that each size has seen all samples, and the line
    is that of least squares through these means. Chong and Forsyth fit 15 distances of random subsets from 5,000 samples
    up to all; with 50,000 samples the sizes here span the same range, with less noise.

    The interval is the delete-a-group jackknife's of the whole procedure: another set of as many samples. It covers the
    noise of the extrapolation but neither the line's misfit (the bias has terms in 1/N² too) nor the reference's own
    number of images, whose bias stays.

    Raises:
        FidelityError: no moments of disjoint sets, sizes too few for a line, or the smallest subset has no more rows than
            features, unless `options.allow_small`.

    Source: Chong and Forsyth 2020, "Effectively Unbiased FID and Inception Score and where to find them", section 3.
    """
    assert reference is not None
    sets, notes = samples.sets.get(output, ()), []
    sizes = [size for size in range(1, len(sets) + 1) if len(sets) % size == 0]
    if len(sizes) < _FEWEST_SIZES:
        raise FidelityError(
            f"{samples.name}: {len(sets)} disjoint sets make subsets of {len(sizes)} sizes, too few for a line: take 10 sets"
        )
    ends = FrechetReference(reference.moments_of(output))
    fewest = min(each.count or 0 for each in sets)
    for name, count in ((f"each of {len(sets)} sets of {samples.name}", fewest), (reference.name, ends.moments.count)):
        if count is not None and count <= ends.moments.dim:
            notes.append(too_small(name, count, ends.moments.dim, options.allow_small))
    blocks = [_blocks(sets, size, ends) for size in sizes]
    without_each = [_extrapolated([_without(each, number) for each in blocks]) for number in range(len(sets))]
    value = _extrapolated([[block.point for block in each] for each in blocks])
    return Measurement({"fd_inf": jackknife_interval(value, without_each, options.confidence)}, notes)


@dataclass(frozen=True)
class _Block:
    """Subset of joined sets, with its distance and those without each of its sets: pairs of 1/N and distance."""

    sets: range
    point: tuple[float, float]
    without: tuple[tuple[float, float], ...]


def _blocks(sets: Sequence[Moments], size: int, ends: FrechetReference) -> list[_Block]:
    def point(moments: Moments) -> tuple[float, float]:
        assert moments.count is not None
        return 1 / moments.count, ends.distance(moments)

    found = []
    for first in range(0, len(sets), size):
        members = range(first, first + size)
        joined = merged_moments(sets[number] for number in members)
        without = tuple(point(moments_without(joined, sets[number])) for number in members) if size > 1 else ()
        found.append(_Block(members, point(joined), without))
    return found


def _without(blocks: Sequence[_Block], number: int) -> list[tuple[float, float]]:
    """Points of one size where a set is left out, and with it a block that has no other."""
    points = []
    for block in blocks:
        if number not in block.sets:
            points.append(block.point)
        elif block.without:
            points.append(block.without[number - block.sets.start])
    return points


def _extrapolated(sizes: Sequence[Sequence[tuple[float, float]]]) -> float:
    """Ordinate at 0 of the line of least squares through the means of each size's points."""
    inverse, distance = np.array([np.mean(points, axis=0) for points in sizes]).T
    slope = np.cov(inverse, distance)[0, 1] / np.var(inverse, ddof=1)
    return float(distance.mean() - slope * inverse.mean())
