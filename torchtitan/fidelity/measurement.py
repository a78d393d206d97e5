"""Metric of sets of feature vectors: what it needs, which direction is better, what it is given and returns."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from torchtitan.distributed.failures import is_out_of_memory
from torchtitan.errors import EvaluationError, one_line
from torchtitan.fidelity.feature_set import FeatureSet
from torchtitan.statistics.interval import Interval

Better = Literal["lower", "higher"]
Form = Literal["rows", "moments"]


@dataclass(frozen=True)
class Options:
    """Settings of all metrics.

    Attributes:
        confidence: of intervals, in (0, 1).
        seed: of subsets and of the bootstrap, through numpy's PCG64; a named protocol of a tool has the tool's own.
        device: torch device of products of rows with rows.
        neighbours: k of precision, recall, density and coverage, at least 1.
        prdc_samples, prdc_reference: images that these take of each set, at most.
        held_out: images of the distribution of the reference that no generator was trained on, for memorisation.
        held_out_share: share of held-out images that are nearer to a training image than its threshold, in (0, 1).
    """

    confidence: float = 0.95
    seed: int = 0
    device: str = "cpu"
    neighbours: int = 3
    prdc_samples: int = 50_000
    prdc_reference: int = 10_000
    splits: int = 10
    held_out: FeatureSet | None = None
    held_out_share: float = 0.01


@dataclass(frozen=True)
class Measurement:
    """Values of a metric by name, with intervals, and notes for the reader in a sentence each."""

    values: Mapping[str, Interval]
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Metric:
    """Metric of samples, mostly against a reference.

    Attributes:
        output: of the extractor that it reads.
        reference: form of the reference's features that it needs; None: it takes no reference.
        better: direction of each value that it returns, by the value's name; None where neither is better.
        compute: values from feature sets of one extractor, those that it needs.
        extractor: the only one that it is defined for; None: any.
        needs_held_out: True if `Options.held_out` must have rows of the same output.
    """

    title: str
    output: str
    reference: Form | None
    better: Mapping[str, Better | None]
    compute: Callable[[FeatureSet, FeatureSet | None, str, Options], Measurement]
    extractor: str | None = None
    needs_held_out: bool = False

    def measure(self, samples: FeatureSet, reference: FeatureSet | None, options: Options) -> Measurement:
        """Measure samples. Raises EvaluationError: features that are not finite, or too few; an error of a plugin's metric."""
        try:
            found = self.compute(samples, reference, self.output, options)
            values = found.values.values() if isinstance(found, Measurement) else [found]
            if wrong := [type(value).__name__ for value in values if not isinstance(value, Interval)]:
                raise EvaluationError(f"compute returns {wrong[0]} (return Measurement({{name: Interval(value)}}))")
            return Measurement({name: _of_floats(each) for name, each in found.values.items()}, found.notes)
        except EvaluationError:
            raise
        except Exception as error:  # of a plugin's code: it must not cost the steps of the run that measures
            if is_out_of_memory(error):
                raise  # which ends a run as such, with its remedies
            place = traceback.extract_tb(error.__traceback__)[-1]
            raise EvaluationError(f"{one_line(error)} ({Path(place.filename).name}, line {place.lineno})") from error


def _of_floats(interval: Interval) -> Interval:
    """Interval of Python's numbers, which JSON has, of numpy's or torch's."""
    return replace(interval, value=float(interval.value), lower=float(interval.lower), upper=float(interval.upper))
