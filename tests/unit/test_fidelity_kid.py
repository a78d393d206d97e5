import numpy as np
import pytest

from torchtitan.errors import EvaluationError
from torchtitan.fidelity.feature_set import FeatureSet
from torchtitan.fidelity.kid import kernel_distance, subset_distances
from torchtitan.fidelity.measurement import Options
from torchtitan.fidelity.metrics import METRICS


def by_loops(x, y):
    def kernel(a, b):
        return (a @ b / len(a) + 1) ** 3

    def within(rows):
        return np.mean([kernel(a, b) for i, a in enumerate(rows) for j, b in enumerate(rows) if i != j])

    return within(x) + within(y) - 2 * np.mean([kernel(a, b) for a in x for b in y])


def test_kernel_distance_is_the_mean_over_pairs_also_in_blocks(monkeypatch):
    generator = np.random.default_rng(0)
    x, y = generator.standard_normal((9, 3)) + 1, generator.standard_normal((14, 3))
    whole = kernel_distance(x, y)
    assert whole.value == pytest.approx(by_loops(x, y), rel=1e-12)
    assert kernel_distance(y, x).value == pytest.approx(by_loops(x, y), rel=1e-12)
    monkeypatch.setattr("torchtitan.fidelity.pairs._ROWS", 4)
    blocks = kernel_distance(x, y)
    assert (blocks.value, blocks.lower) == pytest.approx((whole.value, whole.lower), rel=1e-10)


@pytest.mark.parametrize("m, n, shift, excess, coverage", [
    (30, 70, 0.0, (0.95, 1.4), (0.97, 1.0)), (40, 90, 1.0, (0.9, 1.1), (0.9, 0.98)),
])  # fmt: skip
def test_the_standard_error_of_a_kernel_distance_is_its_standard_deviation(m, n, shift, excess, coverage):
    """Without the second order of the variance it would be 0 where both sets have one distribution; there it is up to a
    third too large, since a first order below 0 counts as 0."""
    generator = np.random.default_rng(3)
    repeats = 400
    truth = kernel_distance_of_normals(shift, 8)
    found = [
        kernel_distance(generator.standard_normal((m, 8)) + shift, generator.standard_normal((n, 8)))
        for _ in range(repeats)
    ]
    values = np.array([each.value for each in found])
    errors = np.array([each.half_width for each in found]) / 1.95996
    assert excess[0] <= np.sqrt(np.mean(errors**2)) / values.std() <= excess[1]
    assert values.mean() == pytest.approx(truth, abs=4 * values.std() / np.sqrt(repeats))
    assert coverage[0] <= np.mean([not each.excludes(truth) for each in found]) <= coverage[1]


def kernel_distance_of_normals(shift, dim):
    """Squared MMD of N(shift 1, I) and N(0, I): E (u + 1)³ of u = x·y / D, from the moments of x·y."""

    def expected(mean_x, mean_y):
        # x·y given x is normal with mean x·mean_y and variance |x|².
        a, p, q = mean_x * mean_y * dim, mean_x**2 * dim, mean_y**2 * dim  # mean_x·mean_y, |mean_x|², |mean_y|²
        second = a**2 + q + p + dim
        third = a**3 + 3 * a * (q + p + dim) + 6 * a
        return third / dim**3 + 3 * second / dim**2 + 3 * a / dim + 1

    return expected(shift, shift) + expected(0, 0) - 2 * expected(shift, 0)


def test_subsets_are_drawn_without_replacement_from_each_set():
    generator = np.random.default_rng(4)
    x, y = generator.standard_normal((60, 3)), generator.standard_normal((50, 3)) + 0.5
    found = subset_distances(x, y, subsets=300, size=20)
    assert np.mean(found) == pytest.approx(kernel_distance(x, y).value, abs=4 * np.std(found) / np.sqrt(300))
    whole = subset_distances(x[:50], y, subsets=2, size=50)
    assert whole == pytest.approx([kernel_distance(x[:50], y).value] * 2, rel=1e-9)


def test_sets_too_small_for_the_subsets_are_noted():
    generator = np.random.default_rng(5)
    samples, reference = (FeatureSet(name, "inception", {"pooled": generator.standard_normal((count, 3))})
                          for name, count in (("samples", 1000), ("reference", 999)))  # fmt: skip
    small = METRICS["kid"].measure(samples, reference, Options())
    assert list(small.values) == ["kid"] and "left out" in small.notes[0]
    both = METRICS["kid"].measure(samples, samples, Options())
    assert list(both.values) == list(METRICS["kid"].better)
    with pytest.raises(EvaluationError, match="at least 4 rows in each set, not 3 and 5"):
        kernel_distance(np.zeros((3, 2)), np.zeros((5, 2)))
