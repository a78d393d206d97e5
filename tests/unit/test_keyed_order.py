"""Order of an epoch without a table: a permutation that is uniform, known at any place, and takes over by size alone."""

import math

import numpy as np
import pytest

from torchtitan.training import sample_order
from torchtitan.training.keyed_permutation import NUM_ROUNDS, KeyedPermutation
from torchtitan.training.sample_order import MOST_IN_TABLE, BucketOrder, SampleOrder

BLOCKS = np.array([5, 1, 8, 3, 7, 7, 2, 9, 4, 6])  # images of each
BLOCK_OF_IMAGE = np.repeat(np.arange(10), BLOCKS)
COUNT = int(BLOCKS.sum())


@pytest.fixture
def computed(monkeypatch):
    monkeypatch.setattr(sample_order, "MOST_IN_TABLE", 0)


def permutations(count: int, number: int) -> np.ndarray:
    """Permutations of random keys, int64 [number, count]."""
    keys = np.random.Philox(3).random_raw((number, NUM_ROUNDS))
    return np.stack([KeyedPermutation(count, of_one)(np.arange(count)) for of_one in keys])


def assert_uniform(counts: np.ndarray, freedom: int) -> None:
    """Chi-square of equally likely counts: mean `freedom`, variance twice that; 5 standard deviations are allowed."""
    expected = counts.mean()
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert abs(chi_square - freedom) < 5 * math.sqrt(2 * freedom), chi_square


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 63, 64, 65, 1000, 1025])
def test_every_number_comes_once(count):
    for values in permutations(count, 3):
        assert sorted(values) == list(range(count))


def test_every_place_has_every_value_and_neighbour_alike_often():
    count, number = 12, 2000
    values = permutations(count, number)
    places = np.broadcast_to(np.arange(count), values.shape)
    counts = np.zeros((count, count))
    np.add.at(counts, (places, values), 1)
    assert_uniform(counts, (count - 1) ** 2)
    pairs = np.zeros((count, count))  # of the values at the first two places
    np.add.at(pairs, (values[:, 0], values[:, 1]), 1)
    assert pairs.diagonal().sum() == 0
    assert_uniform(pairs[~np.eye(count, dtype=bool)], count * (count - 1) - 1)
    cycles = (values == np.arange(count)).sum(1)  # fixed points: of mean 1 and variance 1
    assert abs(cycles.mean() - 1) < 5 / math.sqrt(number)


def test_neighbours_of_a_large_dataset_are_as_far_apart_as_at_random():
    count, drawn = 10**9 + 7, 64_000
    values = SampleOrder(count, 5, 0).indices(np.arange(drawn))
    assert len(set(values.tolist())) == drawn and 0 <= values.min() and values.max() < count
    assert_uniform(np.bincount(values * 64 // count, minlength=64), 63)
    distances = np.diff(values) % count
    assert_uniform(np.bincount(distances * 64 // count, minlength=64), 63)


def test_an_order_is_known_at_any_place_and_differs_by_epoch_attempt_seed_and_stream(computed):
    def order(seed=1, attempt=0, stream=0):
        return SampleOrder(1000, seed, attempt, stream=stream)

    straight = order().indices(np.arange(3000))
    resumed = np.concatenate([order().indices(np.arange(begin, begin + 250)) for begin in range(0, 3000, 250)])
    assert np.array_equal(straight, resumed)
    for epoch in range(3):
        assert sorted(straight[1000 * epoch : 1000 * (epoch + 1)]) == list(range(1000))
    firsts = [straight[:1000], straight[1000:2000], *(
        order(**other).indices(np.arange(1000)) for other in ({"seed": 2}, {"attempt": 1}, {"stream": 1})
    )]  # fmt: skip
    for number, one in enumerate(firsts):
        for other in firsts[:number]:
            assert (one != other).mean() > 0.98


@pytest.mark.parametrize("at_a_time", [1, 10])
def test_windows_of_blocks_are_kept(computed, at_a_time):
    order = SampleOrder(COUNT, 1, 0, BLOCKS, at_a_time)
    for epoch in range(3):
        indices = order.indices(np.arange(epoch * COUNT, (epoch + 1) * COUNT))
        assert sorted(indices) == list(range(COUNT))
        blocks = BLOCK_OF_IMAGE[indices]
        assert at_a_time == 1 or (np.diff(blocks) != 0).mean() > 0.4
        while len(blocks):  # one window after the other
            window = list(dict.fromkeys(blocks))[:at_a_time]
            count = int(BLOCKS[window].sum())
            assert set(blocks[:count]) == set(window)
            blocks = blocks[count:]


def test_buckets_are_computed_too(computed):
    order = BucketOrder(np.array([30, 0, 50]), 1, 0, 10)
    assert sorted(order.indices(np.arange(80))) == list(range(80))


def test_size_alone_chooses_and_smaller_datasets_keep_their_order(monkeypatch):
    tables = []
    monkeypatch.setattr(SampleOrder, "_table", lambda self, epoch: tables.append(self._num_images) or np.arange(self._num_images))
    for count in (MOST_IN_TABLE, MOST_IN_TABLE + 1):
        SampleOrder(count, 1, 0).indices(np.arange(4))
    assert tables == [MOST_IN_TABLE] == [1 << 22]


def test_the_order_is_the_same_on_every_machine(computed):
    assert SampleOrder(10, 5, 1).indices(np.arange(10)).tolist() == [9, 3, 7, 6, 4, 8, 2, 0, 5, 1]
    assert SampleOrder(10**9, 5, 1).indices(np.array([0, 1, 10**9 - 1])).tolist() == [994219606, 515048055, 399536569]
