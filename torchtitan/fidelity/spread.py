"""Spread of a metric over disjoint sets of samples, as papers that report the best of several leave it out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torchtitan.fidelity.disjoint_sets import set_numbers
from torchtitan.fidelity.errors import FidelityError
from torchtitan.fidelity.feature_set import FeatureSet
from torchtitan.fidelity.measurement import Options
from torchtitan.fidelity.metrics import Metric
from torchtitan.fidelity.moments import merged_moments
from torchtitan.statistics.interval import Interval, mean_interval


@dataclass(frozen=True)
class Spread:
    """Spread of a value over disjoint sets of samples.

    Attributes:
        values: of each set.
        mean: their mean with Student's interval: of the value at this number of samples, with its bias.
    """

    values: tuple[float, ...]
    mean: Interval


def spread_over_sets(
    metric: Metric, samples: FeatureSet, reference: FeatureSet | None, options: Options, count: int, seed: int = 0
) -> Mapping[str, Spread]:
    """Measure a metric on each of `count` disjoint sets of the samples.

    Returns:
        spread of each of the metric's values that every set has, by name.

    Raises:
        FidelityError: of `disjoint_feature_sets` and of the metric, whose limits each set must meet.
    """
    parts = disjoint_feature_sets(samples, count, seed)
    measured = [metric.measure(part, reference, options).values for part in parts]
    return {
        name: _spread([values[name].value for values in measured], options.confidence)
        for name in measured[0]
        if all(name in values for values in measured)
    }


def disjoint_feature_sets(samples: FeatureSet, count: int, seed: int = 0) -> list[FeatureSet]:
    """Divide samples at random into disjoint sets of about one size.

    Rows are assigned by `set_numbers`. Moments of disjoint sets are joined, each set from as many neighbours, and are
    its rows' where they were accumulated with the same seed.

    Args:
        samples: with rows, moments of disjoint sets, or both.
        count: of sets, at least 2; where there are moments of K sets, a divisor of K.
        seed: of the assignment.

    Raises:
        FidelityError: fewer than two sets, a number that does not divide K, or too few samples.
    """
    if count < 2:
        raise FidelityError(f"a spread needs at least 2 disjoint sets, not {count}")
    for output, parts in samples.sets.items():
        if len(parts) % count:
            raise FidelityError(
                f"{samples.name}: {len(parts)} sets of moments of {output} features cannot be joined to {count}: take a divisor"
            )
    whole = max((len(parts) for parts in samples.sets.values()), default=count)
    numbers = {output: set_numbers(len(rows), whole, seed) * count // whole for output, rows in samples.rows.items()}
    found = []
    for number in range(count):
        rows = {output: values[numbers[output] == number] for output, values in samples.rows.items()}
        sets = {
            output: parts[number * len(parts) // count : (number + 1) * len(parts) // count]
            for output, parts in samples.sets.items()
        }
        moments = {output: merged_moments(parts) for output, parts in sets.items()}
        found.append(FeatureSet(f"set {number + 1} of {samples.name}", samples.extractor, rows, moments))
    return found


def _spread(values: list[float], confidence: float) -> Spread:
    return Spread(tuple(values), mean_interval(values, confidence))
