import numpy as np
import pytest

from tests.evaluations import frechet_distance
from torchtitan.errors import EvaluationError
from torchtitan.fidelity.feature_set import FeatureSet
from torchtitan.fidelity.frechet import jackknife_interval
from torchtitan.fidelity.measurement import Options
from torchtitan.fidelity.metrics import METRICS
from torchtitan.fidelity.moments import Moments, moments_of_rows
from torchtitan.statistics.interval import mean_interval


def of_rows(rows_a, rows_b):
    return frechet_distance(moments_of_rows(rows_a), moments_of_rows(rows_b))


def test_frechet_distance_equals_the_closed_form_for_commuting_covariances():
    """With one eigenbasis the distance is |mean difference|² + sum of (standard deviation difference)²."""
    generator = np.random.default_rng(0)
    basis = np.linalg.qr(generator.standard_normal((6, 6)))[0]
    deviation_a, deviation_b = np.array([3, 2, 1, 0.5, 0.1, 0]), np.array([1, 2, 2, 0, 0.3, 0.2])
    mean_a, mean_b = generator.standard_normal((2, 6))
    expected = np.square(mean_a - mean_b).sum() + np.square(deviation_a - deviation_b).sum()
    covariances = [(basis * deviation**2) @ basis.T for deviation in (deviation_a, deviation_b)]
    a, b = (Moments(None, mean, each) for mean, each in zip((mean_a, mean_b), covariances, strict=True))
    assert frechet_distance(a, b) == pytest.approx(expected)
    assert frechet_distance(a, a) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("dim, rows", [(8, 8), (60, 50), (200, 400)])
def test_frechet_distance_equals_scipys_matrix_root(dim, rows):
    """Also where the covariances, of rank rows - 1, are singular."""
    sqrtm = pytest.importorskip("scipy.linalg").sqrtm
    generator = np.random.default_rng(1)
    a, b = generator.standard_normal((2, rows, dim)) @ (generator.standard_normal((2, dim, dim)) / np.sqrt(dim))
    of_a, of_b = moments_of_rows(a), moments_of_rows(b + 0.1)
    root = sqrtm(of_a.covariance @ of_b.covariance).real
    expected = np.square(of_a.mean - of_b.mean).sum() + np.trace(of_a.covariance + of_b.covariance - 2 * root)
    distance = frechet_distance(of_a, of_b)
    assert distance == pytest.approx(expected, rel=1e-6)
    assert distance == pytest.approx(frechet_distance(of_b, of_a), rel=1e-9)


def test_the_interval_of_a_frechet_distance_is_its_spread_over_sets_of_samples():
    """Sets of 400 are drawn 120 times: the jackknife's standard error is their standard deviation, and its interval holds
    the mean distance at 400 samples, which is not the distance of the Gaussians."""
    generator = np.random.default_rng(5)
    ends = FeatureSet("reference", "own", moments={"pooled": Moments(None, np.zeros(6), np.eye(6))})
    found = []
    for _ in range(120):
        rows = generator.standard_normal((400, 6)) * np.linspace(0.7, 1.6, 6) + 0.2
        samples = FeatureSet("samples", "own", {"pooled": rows})
        found.append(METRICS["fd"].measure(samples, ends, Options()).values["fd"])
    values = np.array([each.value for each in found])
    errors = np.array([each.half_width for each in found]) / 2.2622  # Student's t of 9 degrees of freedom
    two_errors = 2 * np.sqrt(1 / (2 * 119) + 1 / (2 * 9 * 120))  # of the deviation of 120 values, and of 120 with 9 degrees
    assert np.sqrt(np.mean(errors**2)) == pytest.approx(values.std(), rel=two_errors)
    assert 0.9 <= np.mean([not each.excludes(values.mean()) for each in found]) <= 0.985
    truth = 6 * 0.2**2 + np.square(np.linspace(0.7, 1.6, 6) - 1).sum()
    assert values.mean() - truth > 3 * values.std() / np.sqrt(120)


def test_the_jackknife_of_a_mean_is_students_interval():
    """Without each of K groups, the mean moves by what the group's own mean is off, over K - 1."""
    means = np.array([3.0, 5.0, 4.0, 8.0, 1.0])
    without = (means.sum() - means) / 4
    found, expected = jackknife_interval(means.mean(), without.tolist()), mean_interval(means.tolist())
    assert (found.lower, found.upper) == pytest.approx((expected.lower, expected.upper), rel=1e-12)
    assert not jackknife_interval(1.0, []).bounded


def test_samples_in_order_of_class_have_the_interval_of_shuffled_ones():
    """Groups of neighbours would be of one class each, and their distances far apart."""
    generator = np.random.default_rng(8)
    rows = generator.standard_normal((1000, 4)) + 5 * np.repeat(np.arange(10), 100)[:, None]
    ends = FeatureSet("reference", "own", {"pooled": generator.permutation(rows) + 0.1})
    ordered, mixed = (
        METRICS["fd"].measure(FeatureSet("samples", "own", {"pooled": each}), ends, Options()).values["fd"]
        for each in (rows, generator.permutation(rows))
    )
    # Eigenvalues of the covariances' product are off by the rounding of the largest one, and the root of one near 1 by half of
    # that: 4 roots in each of two distances.
    largest = np.linalg.eigvalsh(np.cov(rows.T)).max() ** 2
    assert ordered.value == pytest.approx(mixed.value, abs=2 * 4 * np.finfo(float).eps * largest / 2)
    # The logarithm of a standard error of 10 groups has a standard deviation of 1 / sqrt(2 * 9): three of the difference's.
    assert abs(np.log(ordered.half_width / mixed.half_width)) < 3 * (2 / 18) ** 0.5


def test_a_set_smaller_than_its_rank_is_noted():
    generator = np.random.default_rng(6)
    many, few = generator.standard_normal((500, 20)), generator.standard_normal((20, 20))
    reference, samples = (FeatureSet(name, "inception", {"pooled": rows}) for name, rows in
                          (("reference", many), ("samples", few)))  # fmt: skip
    found = METRICS["fid"].measure(samples, reference, Options())
    assert found.values["fid"].bounded and found.values["fid"].value > 0
    assert "samples: a covariance of 20 features from 20 images has rank 19 at most" in found.notes[0]
    assert not METRICS["fid"].measure(reference, reference, Options()).notes


def test_frechet_distance_refuses_what_it_cannot_fit():
    with pytest.raises(EvaluationError, match="1 feature vectors .* at least 2"):
        of_rows(np.zeros((1, 3)), np.zeros((5, 3)))
    with pytest.raises(EvaluationError, match="samples have 3 features and the reference has 4"):
        of_rows(np.eye(3), np.eye(4))
