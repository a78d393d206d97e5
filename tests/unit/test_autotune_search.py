"""The searches over batch sizes, against exhaustive scans."""

import math
from collections.abc import Sequence

import pytest

from torchtitan.experiments.autotune.search import doublings, fastest, largest_fitting

DIVISORS_OF_96 = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 96]


class Tries:
    """Whether a batch size is at most a limit; remembers what was asked, and that nothing is asked twice."""

    def __init__(self, limit: int) -> None:
        self.limit, self.asked = limit, []

    def __call__(self, batch_size: int) -> bool:
        assert batch_size not in self.asked
        self.asked.append(batch_size)
        return batch_size <= self.limit


@pytest.mark.parametrize(
    "candidates", [range(1, 41), range(8, 129, 8), range(12, 100, 4), DIVISORS_OF_96, [5]],
    ids=["all", "multiples of 8", "from 12", "divisors", "one"],
)  # fmt: skip
def test_largest_is_that_of_an_exhaustive_scan_for_every_limit_and_guess(candidates: Sequence[int]):
    for limit in range(candidates[-1] + 2):
        exhaustive = max((size for size in candidates if size <= limit), default=None)
        for guess in {0, 1, candidates[0], candidates[len(candidates) // 2], limit, candidates[-1], 10**6}:
            tries = Tries(limit)
            assert largest_fitting(candidates, guess, tries) == exhaustive, (limit, guess)
            assert set(tries.asked) <= set(candidates)


def test_largest_begins_with_the_guess_and_takes_few_tries_from_a_good_one():
    tries = Tries(limit=700)
    assert largest_fitting(range(8, 65537, 8), 690, tries) == 696
    assert tries.asked[0] == 688
    # 688 and 1376, and then the 85 multiples between them.
    assert len(tries.asked) <= 2 + math.ceil(math.log2(86))


def test_doublings_skip_candidates_nearer_than_twice():
    assert doublings(DIVISORS_OF_96) == [1, 2, 4, 8, 16, 32, 96]
    assert doublings(range(3, 31, 3)) == [3, 6, 12, 24]
    assert doublings(range(12, 100, 4)) == [12, 24, 48, 96]


def measured(rates: dict[int, list[float | None]], asked: list[tuple[int, int]] | None = None):
    def rate(batch_size: int, repeat: int) -> float | None:
        if asked is not None:
            asked.append((batch_size, repeat))
        return rates[batch_size][repeat]

    return rate


@pytest.mark.parametrize(
    ("rates", "knee"),
    [
        # Saturation: 97.1 is within 3 % of 100, 96.9 is not.
        ({1: [50], 2: [80], 4: [97.1] * 3, 8: [100] * 3}, 4),
        ({1: [50], 2: [80], 4: [96.9] * 3, 8: [100] * 3}, 8),
        # The largest need not be the fastest.
        ({1: [70], 2: [100], 4: [80], 8: [75]}, 2),
        # One lucky measurement does not make a knee, and one unlucky does not unmake it: medians count.
        ({4: [99, 90, 91], 8: [100, 100, 100]}, 8),
        ({4: [95, 99, 99], 8: [100, 100, 100]}, 4),
        # A best that was chance: seen again it is not near the others any more.
        ({2: [96, 96, 96], 4: [100, 80, 80]}, 2),
        # The ladder ends where a batch size does not fit.
        ({2: [10], 4: [20], 8: [None]}, 4),
        # A batch size that does not fit when seen again is out.
        ({2: [98, 98, 98], 4: [100, None]}, 2),
        ({2: [None]}, None),
    ],
)
def test_fastest_is_the_smallest_within_three_percent_by_medians(rates, knee):
    assert fastest(list(rates), measured(rates)) == knee


def test_only_close_rates_are_measured_again():
    asked = []
    rates = {1: [50.0], 2: [93.9], 4: [95.0] * 3, 8: [100.0] * 3}
    assert fastest(list(rates), measured(rates, asked)) == 8
    assert asked == [(1, 0), (2, 0), (4, 0), (8, 0), (4, 1), (8, 1), (4, 2), (8, 2)]
    asked.clear()
    assert fastest([1, 2], measured({1: [50.0], 2: [100.0]}, asked)) == 2
    assert asked == [(1, 0), (2, 0)]
