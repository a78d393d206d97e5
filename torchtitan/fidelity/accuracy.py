"""Share of samples that a classifier recognises as the class that was asked for."""

from __future__ import annotations

from torchtitan.errors import EvaluationError
from torchtitan.fidelity.feature_set import FeatureSet
from torchtitan.fidelity.measurement import Measurement, Metric, Options
from torchtitan.statistics.interval import binomial_interval


def measure_accuracy(samples: FeatureSet, _reference: FeatureSet | None, output: str, options: Options) -> Measurement:
    """Share of samples with their largest logit at the class that was asked for, with Wilson's interval.

    It is as good as the classifier: the share of real held-out images is its upper limit, and typical samples pass it.

    Raises:
        EvaluationError: a class that the classifier does not know.
    """
    logits = samples.rows_of(output)
    assert samples.classes is not None  # checked before samples are drawn or read
    if (wrong := samples.classes[samples.classes >= logits.shape[1]]).size:
        raise EvaluationError(f"{samples.name}: class {wrong[0]} is none of {samples.extractor}'s {logits.shape[1]} classes")
    right = int((logits.argmax(axis=1) == samples.classes).sum())
    return Measurement({"accuracy": binomial_interval(right, len(logits), options.confidence)})


ACCURACY = Metric("Recognised as the class asked for", "logits", None, {"accuracy": "higher"}, measure_accuracy)
