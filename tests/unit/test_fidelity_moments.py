import numpy as np
import pytest

from torchtitan.errors import EvaluationError
from torchtitan.fidelity.moments import Moments, merged_moments, moments_of_rows, moments_without


@pytest.fixture(scope="module")
def rows():
    """Far from zero, so that sums of squares would lose eight digits."""
    generator = np.random.default_rng(0)
    return generator.standard_normal((3000, 12)) @ generator.standard_normal((12, 12)) + 1e4


def difference(found: Moments, rows):
    """Largest error of the mean and of the covariance, over the scale of the covariance."""
    expected = np.cov(rows, rowvar=False)  # in two passes
    errors = np.abs(found.mean - rows.mean(axis=0)).max(), np.abs(found.covariance - expected).max()
    return max(errors[0] / np.abs(rows).max(), errors[1] / np.abs(expected).max())


@pytest.mark.parametrize("batch", [1, 7, 1000, 5000])
def test_moments_in_batches_equal_those_of_two_passes(rows, batch, monkeypatch):
    monkeypatch.setattr("torchtitan.fidelity.moments._ROWS_AT_ONCE", batch)
    assert moments_of_rows(rows).count == len(rows)
    assert difference(moments_of_rows(rows), rows) < 1e-12


def test_moments_of_parts_merge_into_those_of_the_whole_and_can_be_taken_out_again(rows):
    parts = [moments_of_rows(part) for part in np.split(rows, [2, 900, 903, 2000])]
    assert difference(merged_moments(parts), rows) < 1e-12
    assert difference(merged_moments(parts[::-1]), rows) < 1e-12
    without = moments_without(merged_moments(parts), parts[3])
    assert without.count == len(rows) - 1097
    assert difference(without, np.delete(rows, np.s_[903:2000], axis=0)) < 1e-12


def test_features_that_have_no_moments_are_refused():
    with pytest.raises(EvaluationError, match="2 of 3 feature vectors"):
        moments_of_rows(np.array([[0, 1], [np.nan, 1], [np.inf, np.nan]]))
