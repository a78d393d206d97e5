import numpy as np
import pytest

from torchtitan.fidelity.errors import FidelityError
from torchtitan.fidelity.feature_set import FeatureSet, feature_set_of_rows
from torchtitan.fidelity.frechet import FrechetReference, frechet_distance
from torchtitan.fidelity.measurement import Options
from torchtitan.fidelity.metrics import METRICS
from torchtitan.fidelity.moments import Moments, moments_of_rows


def of_rows(rows_a, rows_b, weights_b=None):
    return frechet_distance(moments_of_rows(rows_a), moments_of_rows(rows_b, weights_b))


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


def test_frechet_distance_of_singular_covariances_is_that_of_the_subspace_that_they_span():
    """Ten rows in 500 dimensions lie in a subspace of 20 with another set of ten, where nothing is singular but the rank."""
    generator = np.random.default_rng(4)
    inside = generator.standard_normal((2, 10, 20))
    basis = np.linalg.qr(generator.standard_normal((500, 20)))[0]
    expected = of_rows(*inside)
    assert of_rows(*(inside @ basis.T)) == pytest.approx(expected, rel=1e-9)
    assert of_rows(inside[0] @ basis.T, inside[0] @ basis.T) == pytest.approx(0, abs=1e-9)


def test_frechet_distance_of_samples_reaches_that_of_their_gaussians():
    generator = np.random.default_rng(2)
    a = generator.standard_normal((200_000, 2)) * [1, 2] + [0, 1]
    b = generator.standard_normal((200_000, 2)) * [3, 2] + [2, 1]
    assert of_rows(a, b) == pytest.approx(2**2 + (3 - 1) ** 2, rel=0.02)


def test_a_whole_weight_counts_like_as_many_copies_of_the_row():
    generator = np.random.default_rng(3)
    a, b = generator.standard_normal((500, 3)), generator.standard_normal((4000, 3))
    weights = np.where(b[:, 0] > 0, 3, 1)
    repeated = of_rows(a, b.repeat(weights, axis=0))
    assert repeated > 0.1
    assert of_rows(a, b, weights) == pytest.approx(repeated, rel=1e-3)  # they differ in bias only


def test_the_interval_of_a_frechet_distance_is_its_spread_over_sets_of_samples():
    """Sets of 400 are drawn 120 times: the jackknife's standard error is their standard deviation, and its interval holds
    the mean distance at 400 samples, which is not the distance of the Gaussians."""
    generator = np.random.default_rng(5)
    ends = FeatureSet("reference", "own", moments={"pooled": Moments(None, np.zeros(6), np.eye(6))})
    found = []
    for _ in range(120):
        rows = generator.standard_normal((400, 6)) * np.linspace(0.7, 1.6, 6) + 0.2
        samples = feature_set_of_rows("samples", "own", {"pooled": rows})
        found.append(METRICS["fd"].measure(samples, ends, Options()).values["fd"])
    values = np.array([each.value for each in found])
    errors = np.array([each.half_width for each in found]) / 2.2622  # Student's t of 9 degrees of freedom
    two_errors = 2 * np.sqrt(1 / (2 * 119) + 1 / (2 * 9 * 120))  # of the deviation of 120 values, and of 120 with 9 degrees
    assert np.sqrt(np.mean(errors**2)) == pytest.approx(values.std(), rel=two_errors)
    assert 0.9 <= np.mean([not each.excludes(values.mean()) for each in found]) <= 0.985
    truth = 6 * 0.2**2 + np.square(np.linspace(0.7, 1.6, 6) - 1).sum()
    assert values.mean() - truth > 3 * values.std() / np.sqrt(120)


def test_sets_smaller_than_their_rank_are_refused_or_noted():
    generator = np.random.default_rng(6)
    many, few = generator.standard_normal((500, 20)), generator.standard_normal((20, 20))
    reference, samples = (feature_set_of_rows(name, "inception", {"pooled": rows}) for name, rows in
                          (("reference", many), ("samples", few)))  # fmt: skip
    with pytest.raises(FidelityError, match="^samples: .* 20 features from 20 images has rank 19 at most: take at least 21 "):
        METRICS["fid"].measure(samples, reference, Options())
    with pytest.raises(FidelityError, match="^samples: .* rank 19"):
        METRICS["fid"].measure(reference, samples, Options())
    allowed = METRICS["fid"].measure(samples, reference, Options(allow_small=True))
    assert allowed.values["fid"].bounded and allowed.values["fid"].value > 0
    assert "as many images" in allowed.notes[0]
    assert not METRICS["fid"].measure(reference, reference, Options()).notes


def test_features_that_are_not_the_metrics_are_refused():
    rows = np.random.default_rng(7).standard_normal((50, 3))
    digits, inception = (feature_set_of_rows(name, name, {"pooled": rows}) for name in ("digits", "inception"))
    with pytest.raises(FidelityError, match="FID is defined for inception features, not for those of digits"):
        METRICS["fid"].measure(digits, digits, Options())
    with pytest.raises(FidelityError, match="extract both with one extractor"):
        METRICS["fd"].measure(digits, inception, Options())
    with pytest.raises(FidelityError, match="has no moments of spatial features, only rows of pooled"):
        METRICS["sfid"].measure(inception, inception, Options())
    with pytest.raises(FidelityError, match="needs a reference"):
        METRICS["fid"].measure(inception, None, Options())


def test_frechet_distance_refuses_what_it_cannot_fit():
    with pytest.raises(FidelityError, match="1 feature vectors .* at least 2"):
        of_rows(np.zeros((1, 3)), np.zeros((5, 3)))
    with pytest.raises(FidelityError, match="5 of 5 feature vectors .* not finite"):
        of_rows(np.zeros((5, 3)), np.full((5, 3), np.nan))
    with pytest.raises(FidelityError, match="samples have 3 features and the reference has 4"):
        of_rows(np.eye(3), np.eye(4))
    with pytest.raises(FidelityError, match="do not fit"):
        FrechetReference(Moments(5, np.zeros(3), np.eye(4)))
