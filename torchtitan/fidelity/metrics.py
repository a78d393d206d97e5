"""Metrics of sets of feature vectors by name: what each needs, which direction is better, and its measurement.

    metric = METRICS["fid"]
    samples = FeatureSet("samples", "inception", {"pooled": rows})
    metric.measure(samples, reference, Options()).values["fid"]  # an Interval
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

from torchtitan.fidelity.accuracy import measure_accuracy
from torchtitan.fidelity.feature_set import FeatureSet
from torchtitan.fidelity.frechet import measure_frechet
from torchtitan.fidelity.inception_score import measure_inception_score
from torchtitan.fidelity.kid import measure_kid
from torchtitan.fidelity.measurement import Measurement, Options
from torchtitan.fidelity.memorisation import measure_memorisation
from torchtitan.fidelity.prdc import measure_prdc

Better = Literal["lower", "higher"]
Form = Literal["rows", "moments"]


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
        """Measure samples. Raises EvaluationError: features that are not finite, or too few."""
        return self.compute(samples, reference, self.output, options)


def _frechet(title: str, name: str, output: str, extractor: str | None = None) -> Metric:
    return Metric(title, output, "moments", {name: "lower"}, partial(measure_frechet, name), extractor)


METRICS: Mapping[str, Metric] = {
    "fid": _frechet("FID", "fid", "pooled", "inception"),
    "sfid": _frechet("sFID", "sfid", "spatial", "inception"),
    "fd_dinov2": _frechet("FD-DINOv2", "fd_dinov2", "pooled", "dinov2"),
    "fd": _frechet("Fréchet distance", "fd", "pooled"),
    "kid": Metric(
        "KID", "pooled", "rows", {"kid": "lower", "kid_subsets_mean": "lower", "kid_subsets_sd": None}, measure_kid
    ),
    "is": Metric(
        "Inception score", "logits", None, {"is": "higher", "is_sd": None, "is_file_order": "higher"},
        measure_inception_score,
    ),
    "prdc": Metric(
        "Precision, recall, density, coverage", "pooled", "rows",
        {"precision": "higher", "recall": "higher", "density": "higher", "coverage": "higher"}, measure_prdc,
    ),
    "accuracy": Metric("Recognised as the class asked for", "logits", None, {"accuracy": "higher"}, measure_accuracy),
    "memorisation": Metric(
        "Memorisation", "pooled", "rows",
        {"memorised": "lower", "memorised_held_out": None, "memorised_threshold": None}, measure_memorisation,
        needs_held_out=True,
    ),
}
