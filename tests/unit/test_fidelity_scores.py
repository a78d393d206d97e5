"""Inception score and accuracy."""

import numpy as np
import pytest

from torchtitan.errors import EvaluationError
from torchtitan.fidelity.feature_set import FeatureSet
from torchtitan.fidelity.measurement import Measurement, Metric, Options
from torchtitan.fidelity.metrics import METRICS
from torchtitan.statistics.interval import Interval


def inception_score(logits, **options):
    return METRICS["is"].measure(FeatureSet("samples", "own", {"logits": logits}), None, Options(**options))


def test_the_score_of_certain_and_evenly_spread_classes_is_their_number():
    logits = 100 * np.eye(8)[np.arange(4000) % 8]
    found = inception_score(logits).values
    assert found["is"].value == pytest.approx(8, rel=0.02)
    assert found["is_file_order"].value == pytest.approx(8, rel=1e-9)
    assert inception_score(np.zeros((40, 8))).values["is"].value == pytest.approx(1, abs=1e-12)


def test_the_score_is_the_mean_of_its_splits():
    generator = np.random.default_rng(0)
    logits = 3 * generator.standard_normal((57, 6)).astype(np.float32)
    p = np.exp(logits.astype(np.float64))
    p /= p.sum(axis=1, keepdims=True)

    def scores(p):
        return [np.exp(np.mean(np.sum(part * np.log(part / part.mean(axis=0)), axis=1))) for part in np.split(p, 3)]

    found = inception_score(logits, splits=3).values
    assert found["is_file_order"].value == pytest.approx(np.mean(scores(p)), rel=1e-12)
    shuffled = scores(p[np.random.RandomState(2020).permutation(57)])
    assert (found["is"].value, found["is_sd"].value) == pytest.approx((np.mean(shuffled), np.std(shuffled)), rel=1e-12)


@pytest.mark.parametrize(("compute", "said"), [
    (lambda *given: 1.0, r"^compute returns float \(return Measurement\({name: Interval\(value\)}\)\)$"),
    (lambda *given: Measurement({"a": 1.0}), "^compute returns float"),
    (lambda *given: 1 / 0, r"^ZeroDivisionError: division by zero \(test_fidelity_scores.py, line \d+\)$"),
])  # fmt: skip
def test_an_error_of_a_plugins_metric_is_one_line(compute, said):
    with pytest.raises(EvaluationError, match=said):
        Metric("number", "logits", None, {}, compute).measure(FeatureSet("samples", "own", {}), None, Options())


def test_numbers_of_numpy_become_those_of_json():
    metric = Metric("number", "logits", None, {}, lambda *given: Measurement({"a": Interval(np.float32(0.5), count=3)}))
    found = metric.measure(FeatureSet("samples", "own", {}), None, Options()).values["a"]
    assert type(found.value) is float and found == Interval(0.5, count=3)


def test_accuracy_is_the_share_recognised_as_the_class_asked_for():
    classes = np.arange(200) % 10
    logits = np.eye(10)[np.where(np.arange(200) < 30, (classes + 1) % 10, classes)]
    samples = FeatureSet("samples", "own", {"logits": logits}, classes=classes)
    found = METRICS["accuracy"].measure(samples, None, Options()).values["accuracy"]
    z = 1.959963984540054  # Wilson's interval
    centre = (0.85 + z**2 / 400) / (1 + z**2 / 200)
    half = z / (1 + z**2 / 200) * np.sqrt(0.85 * 0.15 / 200 + z**2 / (4 * 200**2))
    assert (found.value, found.lower, found.upper) == pytest.approx((0.85, centre - half, centre + half), rel=1e-9)
    with pytest.raises(EvaluationError, match="class 10 is none of own's 10 classes"):
        METRICS["accuracy"].measure(FeatureSet("samples", "own", {"logits": logits}, classes=classes + 1), None, Options())


def test_samples_in_order_of_class_are_noted_and_lose_what_the_note_says():
    generator = np.random.default_rng(1)
    logits = 4 * np.eye(10)[np.repeat(np.arange(10), 200)] + generator.standard_normal((2000, 10))
    found = inception_score(logits)
    assert "98 % too low" not in found.notes[0] and "few classes (sorted?)" in found.notes[0]
    lost = 1 - found.values["is_file_order"].value / found.values["is"].value
    assert f"{100 * lost:.0f} % too low" in found.notes[0] and lost > 0.5
    mixed = inception_score(generator.permutation(logits))
    assert not any("sorted" in note for note in mixed.notes)
    assert mixed.values["is_file_order"].value == pytest.approx(found.values["is"].value, rel=0.03)


def test_logits_without_a_score_are_refused():
    with pytest.raises(EvaluationError, match="at least 2 classes, not 1"):
        inception_score(np.zeros((100, 1)))
    with pytest.raises(EvaluationError, match="19 images are too few for 10 splits"):
        inception_score(np.zeros((19, 5)))
