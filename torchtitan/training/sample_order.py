"""Order of a dataset's images in training: a function of (seed, epoch, attempt).

Up to MOST_IN_TABLE images an epoch is a table, sorted by random words. For more it is computed place by place: a table of
10^9 images has 8 GB on every rank, and takes minutes to sort.
"""

from bisect import bisect_right
from collections.abc import Callable

import numpy as np
import torch

from torchtitan import philox
from torchtitan.data.base import Dataset
from torchtitan.training.keyed_permutation import NUM_ROUNDS, KeyedPermutation

# The number is part of the meaning of checkpoints: a run in the middle of an epoch resumes in the same order.
MOST_IN_TABLE = 1 << 22

_Places = Callable[[np.ndarray], np.ndarray]  # places in an epoch -> images, int64 [B] each


class SampleOrder:
    """Order of the samples: every image once per epoch, in another order each epoch.

    With `blocks` each epoch shuffles the blocks, cuts their row into windows, and shuffles the images of a window
    among themselves: at any position a run reads from the blocks of one window.
    """

    def __init__(
        self, num_images: int, seed: int, attempt: int, blocks: np.ndarray | None = None, blocks_at_a_time: int = 1,
        stream: int = 0,
    ) -> None:  # fmt: skip
        """
        Args:
            blocks: number of images in each run of neighbours that is read as one, int64 [K], together `num_images`;
                None: all images cost the same.
            blocks_at_a_time: blocks of a window; the last window of an epoch may have fewer.
            stream: number of this order among those of one run, in [0, 2^32), each with its own permutations.
        """
        self._num_images = num_images
        self._seed = seed
        self._attempt = attempt
        self._blocks = blocks
        self._blocks_at_a_time = blocks_at_a_time
        self._stream = stream
        self._epochs: dict[int, _Places] = {}

    def indices(self, samples: np.ndarray) -> np.ndarray:
        """Return the image index of each sample number, int64 [B]."""
        epochs, positions = np.divmod(samples, self._num_images)
        indices = np.empty_like(samples)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            indices[chosen] = self._epoch(int(epoch))(positions[chosen])
        return indices

    def _epoch(self, epoch: int) -> _Places:
        if epoch not in self._epochs:
            # A step may straddle two epochs, and each of its microbatches asks for both.
            self._epochs = {known: kept for known, kept in self._epochs.items() if known == epoch - 1}
            in_table = self._num_images <= MOST_IN_TABLE
            self._epochs[epoch] = self._table(epoch).__getitem__ if in_table else self._computed(epoch)
        return self._epochs[epoch]

    def _table(self, epoch: int) -> np.ndarray:
        num_blocks = 0 if self._blocks is None else len(self._blocks)
        words = _raw_words(self._seed, self._attempt, self._stream, epoch, num_blocks + self._num_images)
        # The last key of a lexicographic sort comes first, and equal words stay in stored order.
        return np.lexsort((words[num_blocks:], self._windows(words[:num_blocks])))

    def _computed(self, epoch: int) -> _Places:
        blocks = np.array([self._num_images]) if self._blocks is None else self._blocks
        words = _raw_words(self._seed, self._attempt, self._stream, epoch, len(blocks))
        return _ComputedEpoch(
            blocks, np.argsort(words, kind="stable"), self._blocks_at_a_time,
            lambda window: _round_keys(self._seed, self._attempt, self._stream, epoch, window),
        )  # fmt: skip

    def _windows(self, words: np.ndarray) -> np.ndarray:
        """Window of each image, int64 [N], when blocks are sorted by their random words [K]."""
        if self._blocks is None:
            return np.zeros(self._num_images, np.int64)
        windows = np.empty_like(self._blocks)
        windows[np.argsort(words, kind="stable")] = np.arange(len(words)) // self._blocks_at_a_time
        return np.repeat(windows, self._blocks)


class _ComputedEpoch:
    """Epoch without a table of images: its windows of blocks, and in each window a keyed permutation."""

    def __init__(
        self, blocks: np.ndarray, order: np.ndarray, blocks_at_a_time: int, keys_of: Callable[[int], np.ndarray]
    ) -> None:
        """order: of the epoch's blocks, int64 [K]; keys_of: number of a window -> keys of its permutation."""
        self._firsts = (np.cumsum(blocks) - blocks)[order]  # image with which each block begins, in this epoch's order
        self._ends = np.cumsum(blocks[order])  # place in the epoch at which each block would end unshuffled
        self._begins = self._ends - blocks[order]
        self._window_ends = np.append(self._ends[blocks_at_a_time - 1 : -1 : blocks_at_a_time], self._ends[-1])
        self._keys_of = keys_of

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        windows = np.searchsorted(self._window_ends, positions, side="right")
        places = np.empty_like(positions)
        for window in np.unique(windows):
            chosen = windows == window
            begin = int(self._window_ends[window - 1]) if window else 0
            permutation = KeyedPermutation(int(self._window_ends[window]) - begin, self._keys_of(int(window)))
            places[chosen] = begin + permutation(positions[chosen] - begin)
        slots = np.searchsorted(self._ends, places, side="right")
        return self._firsts[slots] + places - self._begins[slots]


class BucketOrder:
    """Order of images in buckets: every global batch is of one bucket, every bucket is an endless row of permutations.

    Each bucket of n images has a row: its images in a new order, then in another, and so on (a SampleOrder). A global
    batch of G images takes the next G of one bucket's row. Epoch e is made of all whole batches that the rows fill up to
    the end of their permutation e and that no epoch before had: floor((e + 1) n / G) - floor(e n / G) of a bucket, in
    an order that is drawn for the epoch. The rest of a permutation, fewer than G images, begins the bucket's first
    batch of a later epoch: nothing is dropped, and a bucket with fewer than G images has a batch every G / n epochs.
    """

    def __init__(
        self, buckets: np.ndarray, seed: int, attempt: int, global_batch_size: int, blocks: np.ndarray | None = None,
        blocks_at_a_time: int = 1,
    ) -> None:  # fmt: skip
        """
        Args:
            buckets: images in each bucket, int64 [K], some perhaps 0; images are numbered bucket by bucket.
            global_batch_size: G, images of one bucket in a row.
            blocks, blocks_at_a_time: as of SampleOrder; each bucket has its share of a window.
        """
        self._buckets = np.asarray(buckets, np.int64)
        self._seed = seed
        self._attempt = attempt
        self._size = global_batch_size
        self._firsts = np.cumsum(self._buckets) - self._buckets
        parts = [None] * len(buckets) if blocks is None else _cut(np.asarray(blocks), self._buckets)
        at_a_time = max(blocks_at_a_time // max(int((self._buckets > 0).sum()), 1), 1)
        self._rows = [
            SampleOrder(int(count), seed, attempt, part, at_a_time, stream=stream)
            for stream, (count, part) in enumerate(zip(self._buckets, parts, strict=True))
        ]
        self._epoch = -1  # of the arrays below, one entry for each of its batches
        self._epoch_buckets = self._epoch_places = np.empty(0, np.int64)

    def indices(self, samples: np.ndarray) -> np.ndarray:
        """Return the image index of each sample number, int64 [B]."""
        batches, slots = np.divmod(samples, self._size)
        indices = np.empty_like(samples)
        for batch in np.unique(batches):
            chosen = batches == batch
            bucket, place = self._place(int(batch))
            indices[chosen] = self._firsts[bucket] + self._rows[bucket].indices(place * self._size + slots[chosen])
        return indices

    def _place(self, batch: int) -> tuple[int, int]:
        """Bucket of a global batch, and the number of earlier batches of that bucket."""
        most = (batch + len(self._buckets)) * self._size // int(self._buckets.sum()) + 2
        epoch = bisect_right(range(most), batch, key=lambda epoch: int(self._batches_before(epoch).sum())) - 1
        before = self._batches_before(epoch)
        if epoch != self._epoch:
            counts = self._batches_before(epoch + 1) - before
            buckets = np.repeat(np.arange(len(counts)), counts)
            places = np.arange(len(buckets)) + np.repeat(before - (np.cumsum(counts) - counts), counts)
            words = _raw_words(self._seed, self._attempt, len(self._buckets), epoch, len(buckets))
            mixed = buckets[np.argsort(words, kind="stable")]
            self._epoch_places = np.empty_like(places)
            self._epoch_places[np.argsort(mixed, kind="stable")] = places  # those of a bucket stay in their order
            self._epoch, self._epoch_buckets = epoch, mixed
        position = batch - int(before.sum())
        return int(self._epoch_buckets[position]), int(self._epoch_places[position])

    def _batches_before(self, epoch: int) -> np.ndarray:
        """Number of batches of each bucket before an epoch, int64 [K]."""
        return epoch * self._buckets // self._size


def sample_order(dataset: Dataset, seed: int, attempt: int, global_batch_size: int) -> SampleOrder | BucketOrder:
    """Order of a dataset by its `buckets` and `blocks`; without buckets the same for any global_batch_size."""
    if dataset.buckets is None:
        return SampleOrder(len(dataset), seed, attempt, dataset.blocks, dataset.blocks_at_a_time)
    return BucketOrder(dataset.buckets, seed, attempt, global_batch_size, dataset.blocks, dataset.blocks_at_a_time)


def _raw_words(seed: int, attempt: int, stream: int, epoch: int, count: int) -> np.ndarray:
    """Random words by which an epoch is sorted, uint64 [count]."""
    number = torch.tensor([epoch + (stream << 32)])
    parts = philox.random_words(seed, "data_order", number, 4, attempt)[0].tolist()
    key = sum(part << (32 * place) for place, part in enumerate(parts))
    # Sorting raw words, because NumPy keeps their stream for ever, but not that of `permutation`.
    return np.random.Philox(key=key).random_raw(count)


def _round_keys(seed: int, attempt: int, stream: int, epoch: int, window: int) -> np.ndarray:
    """Keys of a window's permutation in an epoch, uint64 [NUM_ROUNDS]."""
    # The first four words are those of _raw_words.
    number, first = torch.tensor([epoch + (stream << 32)]), 4 + 2 * NUM_ROUNDS * window
    words = philox.random_words(seed, "data_order", number, 2 * NUM_ROUNDS, attempt, first)[0].numpy().astype(np.uint64)
    return words[0::2] | words[1::2] << np.uint64(32)


def _cut(blocks: np.ndarray, buckets: np.ndarray) -> list[np.ndarray]:
    """Blocks of each bucket, cut where a bucket ends."""
    ends = np.union1d(np.cumsum(blocks), np.cumsum(buckets))
    bucket_of_end = np.searchsorted(np.cumsum(buckets), ends)
    lengths = np.diff(ends, prepend=0)
    return [lengths[(bucket_of_end == bucket) & (lengths > 0)] for bucket in range(len(buckets))]
