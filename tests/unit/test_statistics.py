"""Student's t against closed forms; means and shares with their intervals."""

import math

import pytest
import torch

from torchtitan.statistics.interval import (
    Interval,
    binomial_interval,
    mean_interval,
    paired_difference,
    positive_interval,
)
from torchtitan.statistics.student import student_quantile


def test_student_quantile_is_exact_where_a_closed_form_exists() -> None:
    for probability in (0.9, 0.975, 0.9995):
        tail = 2 * probability - 1
        alpha = 1 - tail**2
        cosine = math.cos(math.acos(math.sqrt(alpha)) / 3) / math.sqrt(alpha)
        closed = [math.tan(0.5 * math.pi * tail), tail * math.sqrt(2 / alpha), 2 * math.sqrt(cosine - 1)]
        found = student_quantile(probability, torch.tensor([1.0, 2.0, 4.0]))
        torch.testing.assert_close(found, torch.tensor(closed, dtype=torch.float64), rtol=1e-8, atol=0)
    normal = torch.special.ndtri(torch.tensor(0.975, dtype=torch.float64)).item()
    assert student_quantile(0.975, 1e6) == pytest.approx(normal, rel=3e-6)
    assert student_quantile(0.975, 0.9) == math.inf
    assert student_quantile(0.975, torch.tensor(2.0)).item() == pytest.approx(4.3026527, rel=1e-7)  # of any shape


def test_rates_with_a_zero_have_no_negative_end() -> None:
    assert positive_interval([0.0, 3.0]).lower == 0.0 < positive_interval([0.0, 3.0]).upper
    assert positive_interval([-1.0, 3.0]).lower < -1.0
    two = positive_interval([1.0, math.e])
    assert two.value == pytest.approx(math.exp(0.5)) and two.upper == pytest.approx(math.exp(0.5 + 12.7062047 / 2))


def test_mean_of_one_two_and_three_values() -> None:
    two = mean_interval([1.0, 3.0])
    assert (two.value, two.count, two.coverage) == (2.0, 2, 0.95)
    assert two.half_width == pytest.approx(12.7062047)  # s / sqrt(n) = 1, t of one degree of freedom
    assert mean_interval([1.0, 2.0, 3.0]).half_width == pytest.approx(4.30265273 / math.sqrt(3))
    assert mean_interval([5.0]) == Interval(5.0, -math.inf, math.inf, 1, None)


def test_no_value_and_an_infinite_one_give_no_interval() -> None:
    assert math.isnan(mean_interval([]).value) and mean_interval([]).count == 0
    for values in ([], [1.0, math.inf]):
        assert not mean_interval(values).bounded
    assert not mean_interval([]).excludes(0.0)


def test_a_difference_is_paired_over_the_keys_that_both_have() -> None:
    assert paired_difference({0: 1.0, 1: 2.0, 2: 9.0}, {1: 1.5, 0: 0.5, 3: 0.0}) == Interval(0.5, 0.5, 0.5, 2, 0.95)


def test_scaling_an_interval_keeps_an_open_end_open() -> None:
    assert Interval(2.0, 1.0, math.inf, 3, 0.9).scaled(2.0) == Interval(4.0, 2.0, math.inf, 3, 0.9)


@pytest.mark.parametrize("successes, trials", [(0, 12), (3, 10), (281, 300), (40, 40)])
def test_the_ends_of_wilsons_interval_are_the_shares_that_the_score_test_just_accepts(successes, trials):
    interval = binomial_interval(successes, trials, 0.9)
    z = 1.6448536269514722
    for end in (interval.lower, interval.upper):
        deviation = abs(successes / trials - end)
        assert deviation == pytest.approx(z * math.sqrt(end * (1 - end) / trials), abs=1e-8)
    assert 0 <= interval.lower <= interval.value <= interval.upper <= 1
    assert interval.upper - interval.lower > 0.01
