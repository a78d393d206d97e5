import numpy as np
import pytest

from torchtitan.fidelity.disjoint_sets import MomentsOfSets, jackknife_interval, set_numbers
from torchtitan.fidelity.errors import FidelityError
from torchtitan.fidelity.moments import Moments, MomentsAccumulator, merged_moments, moments_of_rows, moments_without
from torchtitan.statistics.interval import mean_interval


@pytest.fixture(scope="module")
def rows():
    """Far from zero, so that sums of squares would lose eight digits."""
    generator = np.random.default_rng(0)
    return generator.standard_normal((3000, 12)) @ generator.standard_normal((12, 12)) + 1e4


def two_passes(rows):
    deviations = rows - rows.mean(axis=0)
    return deviations.T @ deviations / (len(rows) - 1)


def difference(found: Moments, rows):
    """Largest error of the mean and of the covariance, over the scale of the covariance."""
    expected = two_passes(rows)
    errors = np.abs(found.mean - rows.mean(axis=0)).max(), np.abs(found.covariance - expected).max()
    return max(errors[0] / np.abs(rows).max(), errors[1] / np.abs(expected).max())


@pytest.mark.parametrize("batch", [1, 7, 1000, 5000])
def test_moments_in_batches_equal_those_of_two_passes(rows, batch):
    accumulator = MomentsAccumulator(12)
    for first in range(0, len(rows), batch):
        accumulator.add(rows[first : first + batch])
    assert accumulator.moments().count == len(rows)
    assert difference(accumulator.moments(), rows) < 1e-12


def test_moments_of_parts_merge_into_those_of_the_whole_and_can_be_taken_out_again(rows):
    parts = [moments_of_rows(part) for part in np.split(rows, [2, 900, 903, 2000])]
    assert difference(merged_moments(parts), rows) < 1e-12
    assert difference(merged_moments(parts[::-1]), rows) < 1e-12
    without = moments_without(merged_moments(parts), parts[3])
    assert without.count == len(rows) - 1097
    assert difference(without, np.delete(rows, np.s_[903:2000], axis=0)) < 1e-12


def test_the_same_parts_in_the_same_order_give_the_same_bits(rows):
    parts = [moments_of_rows(part) for part in np.split(rows, 5)]
    first, second = merged_moments(parts), merged_moments(parts)
    assert np.array_equal(first.covariance, second.covariance) and np.array_equal(first.mean, second.mean)


def test_moments_of_float32_rows_are_accumulated_in_float64(rows):
    single = rows.astype(np.float32)
    assert difference(moments_of_rows(single), single.astype(np.float64)) < 1e-12


def test_moments_of_disjoint_sets_do_not_depend_on_the_batches(rows):
    numbers = set_numbers(len(rows), 7, seed=3)
    assert np.ptp(np.bincount(numbers)) == 1
    accumulators = MomentsOfSets(12, len(rows), 7, seed=3)
    for part in np.split(rows, [10, 11, 2500]):
        accumulators.add(part)
    for number, moments in enumerate(accumulators.moments()):
        assert difference(moments, rows[numbers == number]) < 1e-12


def test_samples_in_order_of_class_are_spread_over_the_sets():
    labels = np.repeat(np.arange(10), 1000)
    shares = [np.bincount(labels[set_numbers(10_000, 10) == number]) / 1000 for number in range(10)]
    assert np.abs(np.array(shares) - 0.1).max() < 0.05


def test_the_jackknife_of_a_mean_is_students_interval():
    """Without each of K sets, the mean moves by what the set's own mean is off, over K - 1."""
    means = np.array([3.0, 5.0, 4.0, 8.0, 1.0])
    without = (means.sum() - means) / 4
    found, expected = jackknife_interval(means.mean(), without.tolist()), mean_interval(means.tolist())
    assert (found.lower, found.upper) == pytest.approx((expected.lower, expected.upper), rel=1e-12)
    assert not jackknife_interval(1.0, []).bounded


def test_features_that_have_no_moments_are_refused():
    with pytest.raises(FidelityError, match="2 of 3 feature vectors"):
        MomentsAccumulator(2).add(np.array([[0, 1], [np.nan, 1], [np.inf, np.nan]]))
    with pytest.raises(FidelityError, match="3 dimensions in a set of 2"):
        MomentsAccumulator(2).add(np.zeros((1, 3)))
    with pytest.raises(FidelityError, match=r"expected rows \[N, D\], got shape \[3\]"):
        moments_of_rows(np.zeros(3))
    with pytest.raises(FidelityError, match="unknown number"):
        merged_moments([Moments(None, np.zeros(1), np.eye(1))])
    with pytest.raises(FidelityError, match="9 samples do not make 5 disjoint sets"):
        set_numbers(9, 5)
