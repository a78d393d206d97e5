"""Metric of sets of feature vectors: what it needs, which direction is better, what it is given and returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torchtitan.errors import EvaluationError
from torchtitan.fidelity.feature_set import FeatureSet
from torchtitan.statistics.interval import Interval

Better = Literal["lower", "higher"]
Form = Literal["rows", "moments"]


@dataclass(frozen=True)
class Options:
    """Settings of all metrics.

    Attributes:
        allow_small: measure sets that are too small for a metric's protocol or rank, with a note, instead of refusing.
        confidence: of intervals, in (0, 1).
        seed: of subsets and of the bootstrap, through numpy's PCG64; a named protocol of a tool has the tool's own.
        device: torch device of products of rows with rows.
        neighbours: k of precision, recall, density and coverage, at least 1.
        prdc_samples, prdc_reference: images that these take of each set, at most.
        splits: of the inception score, at least 1.
        held_out: images of the distribution of the reference that no generator was trained on, for memorisation.
        held_out_share: share of held-out images that are nearer to a training image than its threshold, in (0, 1).
    """

    allow_small: bool = False
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
        title: for tables.
        output: of the extractor that it reads.
        reference: form of the reference's features that it needs; None: it takes no reference.
        better: direction of each value that it returns, by the value's name; None where neither is better.
        compute: values from checked feature sets.
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
        """Measure samples.

        Raises:
            EvaluationError: features that are missing, not finite, too few, or of different extractors.
        """
        given = [each for each in (samples, reference, options.held_out) if each is not None]
        for each in given:
            if each.extractor != samples.extractor:
                raise EvaluationError(
                    f"{samples.name} have features of {samples.extractor} and {each.name} of {each.extractor}: "
                    "extract both with one extractor"
                )
        if self.extractor not in (None, samples.extractor):
            raise EvaluationError(f"{self.title} is defined for {self.extractor} features, not for those of {samples.extractor}")
        if self.reference is not None and reference is None:
            raise EvaluationError(f"{self.title} needs a reference")
        if self.needs_held_out and options.held_out is None:
            raise EvaluationError(f"{self.title} needs held-out images")
        return self.compute(samples, reference, self.output, options)
