"""Images of several shapes: every global batch of one bucket, nothing lost, the same on any number of ranks."""

import itertools
import logging
from collections import Counter

import numpy as np
import pytest

from tests.bucketed_images import SHAPES, Bucketed, BucketedConfig, buckets_of, numbers_of
from torchtitan.data import DatasetError
from torchtitan.errors import CheckpointError
from torchtitan.state.resume import load_position
from torchtitan.training.data_loading import TrainingData, validation_batches
from torchtitan.training.sample_order import BucketOrder, SampleOrder

COUNTS = np.array([50, 23, 0, 6, 121])  # 200 images


def order_of(size, counts=COUNTS, seed=1, attempt=0, **keys):
    return BucketOrder(counts, seed, attempt, size, **keys)


def batches_of(order, size, number, first=0):
    return order.indices(np.arange(first * size, (first + number) * size)).reshape(number, size)


@pytest.mark.parametrize("size", [1, 4, 8, 30, 64])
def test_batches_are_of_one_bucket_and_each_bucket_is_a_row_of_permutations(size):
    epochs = 40
    number = epochs * 200 // size
    batches = batches_of(order_of(size), size, number)
    buckets = [set(buckets_of(batch, COUNTS)) for batch in batches]
    assert all(len(found) == 1 for found in buckets)
    for bucket, count in enumerate(COUNTS):
        row = batches[[found == {bucket} for found in buckets]].reshape(-1)
        first = COUNTS[:bucket].sum()
        whole = len(row) // max(count, 1)
        assert count == 0 or whole >= epochs - size // count - 2
        for permutation in row[: whole * count].reshape(whole, count):
            assert sorted(permutation) == list(range(first, first + count))  # whole, one after the other
        assert len(set(row[whole * count :])) == len(row) - whole * count


@pytest.mark.parametrize("size", [4, 8, 64])
def test_after_every_epoch_each_bucket_is_less_than_one_batch_behind(size):
    order, given = order_of(size), np.zeros(len(COUNTS), int)
    batches = iter(batches_of(order, size, 40 * 200 // size))
    for epoch in range(1, 31):
        for _ in range(sum(epoch * count // size - (epoch - 1) * count // size for count in COUNTS.tolist())):
            given[buckets_of(next(batches)[:1], COUNTS)[0]] += size
        behind = epoch * COUNTS - given
        assert (behind >= 0).all() and (behind < size).all()


def test_an_epoch_that_the_batches_divide_gives_every_image_once():
    counts = np.array([12, 8, 4, 0])
    for epoch in range(3):
        batches = batches_of(order_of(4, counts), 4, 6, first=6 * epoch)
        assert sorted(batches.reshape(-1)) == list(range(24))


def test_one_bucket_is_ordered_as_a_dataset_without_buckets():
    samples = np.arange(3 * 30)
    for counts in ([30], [30, 0]):
        assert np.array_equal(order_of(4, np.array(counts)).indices(samples), SampleOrder(30, 1, 0).indices(samples))


def test_the_order_of_buckets_is_the_same_on_every_machine():
    found = batches_of(order_of(4, np.array([5, 7, 2])), 4, 7).tolist()
    assert found == [
        [4, 0, 1, 2], [5, 9, 10, 8], [12, 13, 13, 12], [11, 7, 6, 10], [9, 11, 5, 6], [3, 0, 4, 1], [7, 8, 9, 6]
    ]  # fmt: skip


def test_buckets_and_their_images_are_shuffled_anew_by_epoch_attempt_and_seed():
    places = (({}, 0), ({}, 50), ({"attempt": 1}, 0), ({"seed": 2}, 0))
    orders = [batches_of(order_of(4, **keys), 4, 50, first) for keys, first in places]
    for number, left in enumerate(orders):
        for right in orders[:number]:
            assert (left != right).mean() > 0.8
            assert (np.array(buckets_of(left[:, 0], COUNTS)) != buckets_of(right[:, 0], COUNTS)).mean() > 0.3
    # Rows of equal length are of different orders.
    row = batches_of(order_of(4, np.array([40, 40])), 4, 20)
    left, right = row[row[:, 0] < 40].reshape(-1), row[row[:, 0] >= 40].reshape(-1) - 40
    assert (left != right).mean() > 0.8


def test_any_batch_is_found_without_those_before_it():
    straight = batches_of(order_of(8), 8, 500)
    for first in (0, 1, 24, 25, 26, 333, 499):
        assert np.array_equal(batches_of(order_of(8), 8, 1, first), straight[first : first + 1])
    one = order_of(8)
    for first in (499, 3, 260, 261, 3):
        assert np.array_equal(batches_of(one, 8, 1, first), straight[first : first + 1])


def test_each_bucket_reads_few_blocks_at_a_time():
    counts, blocks = np.array([40, 0, 30]), np.array([10, 10, 15, 15, 10, 10])  # the fourth straddles the buckets
    order = order_of(5, counts, blocks=blocks, blocks_at_a_time=2)  # one for each bucket
    batches = batches_of(order, 5, 14)
    assert sorted(batches.reshape(-1)) == list(range(70))
    rows = [batches[batches[:, 0] < 40].reshape(-1), batches[batches[:, 0] >= 40].reshape(-1)]
    block_of_image = np.repeat(np.arange(7), [10, 10, 15, 5, 10, 10, 10])
    for row in rows:
        runs = [int(block) for block in block_of_image[row]]
        assert sum(left != right for left, right in itertools.pairwise(runs)) == len(set(runs)) - 1


# --- through the loader


def training_data(rank=0, ranks=1, local=2, size=8, steps=40, config=None, dataset=None):
    config = config or BucketedConfig()
    return TrainingData(
        dataset or Bucketed(config, "train"), config, info=Bucketed.info(config), seed=3, end_sample=steps * size,
        global_batch_size=size, local_batch_size=local, rank=rank, world_size=ranks,
    )  # fmt: skip


def steps_of(ranks, local, steps=40, first=0, **keys):
    """Image numbers of each step in the order of samples, and the shapes of its microbatches."""
    datas = [training_data(rank, ranks, local, **keys) for rank in range(ranks)]
    found = []
    for data in datas:
        load_position(data, {"next_sample": first * 8, "attempt": 0})
    for _ in range(steps - first):
        batches = [data.next_batch() for data in datas for _ in range(data.microbatches_per_step)]
        pairs = [pair for batch in batches for pair in zip(batch["samples"].tolist(), numbers_of(batch), strict=True)]
        found.append((sorted(pairs), {tuple(batch["images"].shape[1:]) for batch in batches}))
    for data in datas:
        data.close()
    return found, datas


def test_global_batches_do_not_depend_on_ranks_microbatches_or_where_a_run_resumes():
    straight, (data,) = steps_of(1, 8)
    assert all(len(shapes) == 1 for _, shapes in straight) and len({*map(str, straight)}) == 40
    for ranks, local in ((1, 2), (2, 4), (2, 2), (4, 1), (4, 2)):
        found, datas = steps_of(ranks, local)
        assert found == straight
        assert all(each.images_by_shape == data.images_by_shape for each in datas)
    assert steps_of(2, 2, first=17)[0] == straight[17:]
    counted = Counter()
    for _, (shape,) in straight:
        counted[shape] += 8
    assert data.images_by_shape == counted and set(counted) == {SHAPES[0], SHAPES[1], SHAPES[3]}
    for sample, number in straight[5][0]:
        assert data.image_of(sample, 0) == number


def test_loader_processes_give_the_same_batches():
    assert steps_of(1, 4, 6, config=BucketedConfig(num_workers=2))[0] == steps_of(1, 4, 6)[0]


def test_an_unreadable_image_is_replaced_by_the_next_of_its_bucket():
    config = BucketedConfig(unreadable=[10, 15, 16])  # the last of the first two buckets, the first of the last
    whole, _ = steps_of(1, 8, config=None)
    found, _ = steps_of(1, 8, config=config)
    instead = {10: 0, 15: 11, 16: 17}
    for (pairs, shapes), (wanted, same) in zip(found, whole, strict=True):
        assert shapes == same
        assert pairs == [(sample, instead.get(number, number)) for sample, number in wanted]
    assert {number for pairs, _ in whole for _, number in pairs} >= set(instead)
    with pytest.raises(DatasetError, match="2 images in a row cannot be decoded, the first is 1[67].png"):
        steps_of(1, 8, config=BucketedConfig(unreadable=[16, 17]))


def test_a_bucket_smaller_than_a_step_is_reported(caplog):
    with caplog.at_level(logging.WARNING):
        training_data()
    (record,) = caplog.records
    assert record.message == (
        "data: 2 of 4 buckets have fewer images than training.global_batch_size = 8, the smallest 2 of 2x2x6: a step of such "
        "a bucket has images twice (a smaller batch or fewer buckets have less of it)"
    )
    caplog.clear()
    training_data(local=2, size=2)
    assert not caplog.records


def test_another_batch_size_does_not_resume_inside_a_global_batch():
    data = training_data(local=3, size=9)
    with pytest.raises(CheckpointError, match="^training.global_batch_size: 8 images were read, no multiple of 9"):
        load_position(data, {"next_sample": 8, "attempt": 0})


# --- held-out images


@pytest.mark.parametrize("count", [3, 5, 8, 100])
@pytest.mark.parametrize(("ranks", "size"), [(1, 3), (2, 2), (3, 100)])
def test_held_out_images_of_every_bucket_are_read_once(count, ranks, size):
    config = BucketedConfig()
    dataset, info = Bucketed(config, "validation"), Bucketed.info(config)
    reads = [list(validation_batches(dataset, info, count, size, rank, ranks)) for rank in range(ranks)]
    assert len({len(batches) for batches in reads}) == 1
    found = Counter()
    for batches in zip(*reads, strict=True):
        assert len({tuple(batch["images"].shape) for batch in batches}) == 1  # the ranks stay together
        for batch in batches:
            assert len(batch["images"]) <= size
            places, weights = batch["indices"].tolist(), batch["weights"].tolist()
            for place, number, weight in zip(places, numbers_of(batch), weights, strict=True):
                found[place, number] += weight
    total = min(count, 8)
    held = sorted(key for key, weight in found.items() if weight)
    assert all(found[key] == 1 for key in held)
    assert [place for place, _ in held] == list(range(total))  # the draw of noise is of these numbers
    of_buckets = Counter(buckets_of([number for _, number in held], config.held_out))
    assert all(abs(of_buckets[bucket] - total * share / 8) < 1 for bucket, share in enumerate(config.held_out))
    assert all(number == place for place, number in held) or total < 8
