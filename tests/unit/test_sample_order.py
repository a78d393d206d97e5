"""Epochs that are shuffled window by window."""

import numpy as np
import pytest

from torchtitan.training.sample_order import SampleOrder

BLOCKS = np.array([5, 1, 8, 3, 7, 7, 2, 9, 4, 6])  # images of each
BLOCK_OF_IMAGE = np.repeat(np.arange(10), BLOCKS)
COUNT = int(BLOCKS.sum())


def epoch(number=0, seed=1, attempt=0, at_a_time=3):
    order = SampleOrder(COUNT, seed, attempt, BLOCKS, at_a_time)
    return order.indices(np.arange(number * COUNT, (number + 1) * COUNT))


@pytest.mark.parametrize("at_a_time", [1, 3, 10, 64])
def test_every_epoch_is_a_permutation_that_reads_few_blocks_at_a_time(at_a_time):
    for number in range(3):
        indices = epoch(number, at_a_time=at_a_time)
        assert sorted(indices) == list(range(COUNT))
        blocks = BLOCK_OF_IMAGE[indices]
        while len(blocks):  # one window after the other
            window = list(dict.fromkeys(blocks))[:at_a_time]
            count = int(BLOCKS[window].sum())
            assert set(blocks[:count]) == set(window)  # all of their images, and no others
            blocks = blocks[count:]


def test_windows_and_the_images_in_them_are_shuffled_anew_by_epoch_attempt_and_seed():
    orders = [epoch(), epoch(1), epoch(attempt=1), epoch(seed=2)]
    assert np.array_equal(epoch(), orders[0])
    for number, order in enumerate(orders):
        for other in orders[:number]:
            assert (order != other).mean() > 0.8
    firsts = {frozenset(BLOCK_OF_IMAGE[epoch(number)[:1]]) for number in range(20)}
    assert len(firsts) > 5  # which blocks come first
    runs = np.diff(BLOCK_OF_IMAGE[epoch(at_a_time=10)]) != 0
    assert runs.mean() > 0.7  # blocks of a window are mixed


def test_the_order_of_blocks_is_the_same_on_every_machine():
    indices = SampleOrder(10, 5, 1, np.array([4, 3, 3]), 2).indices(np.arange(10))
    assert indices.tolist() == [5, 6, 9, 4, 8, 7, 0, 3, 1, 2]
