"""The search over batch sizes, against exhaustive scans."""

import math
from collections.abc import Sequence

import pytest

from torchtitan.experiments.autotune.search import largest_fitting

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
