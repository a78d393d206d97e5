"""Precision, recall, density, coverage and memorisation."""

import numpy as np
import pytest

from torchtitan.errors import EvaluationError
from torchtitan.fidelity import pairs
from torchtitan.fidelity.feature_set import FeatureSet
from torchtitan.fidelity.measurement import Options
from torchtitan.fidelity.metrics import METRICS


def of_rows(rows, name="samples"):
    return FeatureSet(name, "own", {"pooled": rows})


def measured(metric, samples, reference, **options):
    found = METRICS[metric].measure(of_rows(samples), of_rows(reference, "reference"), Options(**options))
    return {name: each.value for name, each in found.values.items()}


def prdc_by_loops(x, y, k):
    """From whole matrices of distances, as the papers write it."""
    radius_x, radius_y = (np.sort(np.linalg.norm(rows[:, None] - rows, axis=2), axis=1)[:, k] for rows in (x, y))
    distances = np.linalg.norm(x[:, None] - y, axis=2)
    inside = distances <= radius_y
    return {
        "precision": inside.any(axis=1).mean(),
        "recall": (distances <= radius_x[:, None]).any(axis=0).mean(),
        "density": inside.sum(axis=1).mean() / k,
        "coverage": inside.any(axis=0).mean(),
    }


@pytest.mark.parametrize("block", [2048, 13])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_precision_and_the_others_equal_those_of_whole_matrices(monkeypatch, block, dtype):
    monkeypatch.setattr(pairs, "_ROWS", block)
    generator = np.random.default_rng(0)
    x = (generator.standard_normal((90, 5)) * 0.8 + 0.7 + 100).astype(dtype)
    y = (generator.standard_normal((70, 5)) + 100).astype(dtype)
    found = measured("prdc", x, y)
    expected = prdc_by_loops(x.astype(np.float64), y.astype(np.float64), 3)
    assert found == pytest.approx(expected, abs=1e-12)
    assert len(set(found.values())) == 4 and found["precision"] > found["recall"]
    swapped = measured("prdc", y, x)
    assert (swapped["precision"], swapped["recall"]) == (found["recall"], found["precision"])


def test_equal_rows_have_distance_zero_far_from_the_origin():
    """Rounding would leave 1e-7 of |a|² + |b|² - 2 a·b, and a ball of radius 0 empty or not by chance."""
    generator = np.random.default_rng(2)
    copies = np.repeat(generator.standard_normal((20, 6)) + 1e4, 5, axis=0)
    found = measured("prdc", copies, copies)
    assert (found["precision"], found["recall"], found["coverage"]) == (1, 1, 1)
    assert found["density"] == pytest.approx(5 / 3)
    assert measured("prdc", copies + 1e-3, copies) == {"precision": 0, "recall": 0, "density": 0, "coverage": 0}


def test_the_interval_of_precision_is_its_spread_over_sets_of_samples():
    generator = np.random.default_rng(3)
    reference = of_rows(generator.standard_normal((150, 4)), "reference")
    found = [
        METRICS["prdc"].measure(of_rows(generator.standard_normal((150, 4)) * 1.3), reference, Options()).values
        for _ in range(150)
    ]
    for name in ("precision", "density"):
        mean = np.mean([each[name].value for each in found])
        assert 0.9 <= np.mean([not each[name].excludes(mean) for each in found]) <= 0.99


def test_larger_sets_are_cut_to_the_protocols_numbers_and_smaller_ones_noted():
    generator = np.random.default_rng(4)
    x, y = generator.standard_normal((300, 3)), generator.standard_normal((200, 3))
    cut = METRICS["prdc"].measure(of_rows(x), of_rows(y), Options(prdc_samples=100, prdc_reference=50))
    assert (cut.values["precision"].count, cut.values["recall"].count) == (100, 50) and not cut.notes
    assert "of 300 samples and 200 reference images" in METRICS["prdc"].measure(of_rows(x), of_rows(y), Options()).notes[0]
    with pytest.raises(EvaluationError, match="reference: 3 images have no 3-th nearest neighbour: take at least 4"):
        measured("prdc", x, y[:3])
    with pytest.raises(EvaluationError, match="samples: pooled: 1 of 300 feature vectors have values that are not finite"):
        measured("prdc", np.where(np.arange(300)[:, None] == 7, np.nan, x), y)
    with pytest.raises(EvaluationError, match="samples have 3 features and the reference has 2"):
        measured("prdc", x, y[:, :2])


def memorised(samples, training, held_out, **options):
    held_out = of_rows(held_out, "held-out images")
    options = Options(held_out=held_out, **options)
    return METRICS["memorisation"].measure(of_rows(samples), of_rows(training), options).values


def test_the_memorised_share_is_that_of_the_copies_among_new_samples():
    generator = np.random.default_rng(8)
    training, held_out, new = (generator.standard_normal((count, 6)) for count in (500, 1000, 2000))
    found = memorised(new, training, held_out, held_out_share=0.05)
    assert found["memorised_held_out"].value == pytest.approx(0.05)
    assert not found["memorised"].excludes(0.05)
    distances = np.linalg.norm(held_out[:, None] - training, axis=2).min(axis=1)
    assert found["memorised_threshold"].value == pytest.approx(np.quantile(distances, 0.05), rel=1e-9)

    copied = np.concatenate([new[:1500], training + 1e-6 * generator.standard_normal(training.shape)])
    found = memorised(copied, training, held_out, held_out_share=0.05)
    assert found["memorised"].value == pytest.approx(0.25 + 0.75 * 0.05, abs=0.02)
    assert found["memorised"].lower > 0.25


def test_the_interval_of_a_memorised_share_covers_the_chance_of_its_threshold():
    """Over draws of both sets, it holds the true share; Wilson's at the threshold found does far more rarely."""
    generator = np.random.default_rng(6)
    training = generator.standard_normal((50, 3))
    held = []
    for _ in range(150):
        samples, held_out = generator.standard_normal((2000, 3)), generator.standard_normal((200, 3))
        found = memorised(samples, training, held_out, held_out_share=0.05)["memorised"]
        held.append(not found.excludes(0.05))
    assert 0.9 <= np.mean(held) <= 0.995


def test_a_threshold_needs_held_out_images():
    generator = np.random.default_rng(7)
    rows = generator.standard_normal((99, 3))
    with pytest.raises(EvaluationError, match="99 images cannot place a threshold below which 1 % .*: take at least 100"):
        memorised(rows, rows, rows)
    none = memorised(rows + 100, rows, np.concatenate([rows, rows]) + 1)["memorised"]
    assert none.value == 0 and none.upper > 0.01


def test_held_out_images_that_are_training_images_are_refused():
    """Their threshold is 0 but for rounding in another batch, and no copy is nearer: the share would be 0 for copies alone."""
    training = np.random.default_rng(9).standard_normal((300, 4)) + 10
    for held_out in (training, training * (1 + 1e-7), np.concatenate([training[:20], training[:280] + 1])):
        with pytest.raises(EvaluationError, match="held-out images: more than 1 % of them are images of the reference"):
            memorised(training, training, held_out)
