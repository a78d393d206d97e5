"""Order of a dataset's images in training: a function of (seed, epoch, attempt)."""

import numpy as np
import torch

from data.base import Dataset
from torchtitan import philox


class SampleOrder:
    """Order of the samples: every image once per epoch, in another order each epoch.

    With `blocks` each epoch shuffles the blocks, cuts their row into windows, and shuffles the images of a window
    among themselves: at any position a run reads from the blocks of one window.
    """

    def __init__(
        self, num_images: int, seed: int, attempt: int, blocks: np.ndarray | None = None, blocks_at_a_time: int = 1
    ) -> None:
        """
        Args:
            num_images: of the dataset.
            seed, attempt: determine the order.
            blocks: number of images in each run of neighbours that is read as one, int64 [K], together `num_images`;
                None: all images cost the same.
            blocks_at_a_time: blocks of a window; the last window of an epoch may have fewer.
        """
        self._num_images = num_images
        self._seed = seed
        self._attempt = attempt
        self._blocks = blocks
        self._blocks_at_a_time = blocks_at_a_time
        self._permutations: dict[int, np.ndarray] = {}

    @staticmethod
    def of(dataset: Dataset, seed: int, attempt: int) -> "SampleOrder":
        """Order of a dataset, with its `blocks` if it has any."""
        return SampleOrder(len(dataset), seed, attempt, dataset.blocks, dataset.blocks_at_a_time)

    def indices(self, samples: np.ndarray) -> np.ndarray:
        """Return the image index of each sample number, int64 [B]."""
        epochs, positions = np.divmod(samples, self._num_images)
        indices = np.empty_like(samples)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            indices[chosen] = self._permutation(int(epoch))[positions[chosen]]
        return indices

    def _permutation(self, epoch: int) -> np.ndarray:
        if epoch not in self._permutations:
            # A step may straddle two epochs, and each of its microbatches asks for both.
            self._permutations = {known: kept for known, kept in self._permutations.items() if known == epoch - 1}
            parts = philox.random_words(self._seed, "data_order", torch.tensor([epoch]), 4, self._attempt)[0].tolist()
            key = sum(part << (32 * place) for place, part in enumerate(parts))
            # Sorting raw words, because NumPy keeps their stream for ever, but not that of `permutation`.
            num_blocks = 0 if self._blocks is None else len(self._blocks)
            words = np.random.Philox(key=key).random_raw(num_blocks + self._num_images)
            # The last key of a lexicographic sort comes first, and equal words stay in stored order.
            self._permutations[epoch] = np.lexsort((words[num_blocks:], self._windows(words[:num_blocks])))
        return self._permutations[epoch]

    def _windows(self, words: np.ndarray) -> np.ndarray:
        """Window of each image, int64 [N], when blocks are sorted by their random words [K]."""
        if self._blocks is None:
            return np.zeros(self._num_images, np.int64)
        windows = np.empty_like(self._blocks)
        windows[np.argsort(words, kind="stable")] = np.arange(len(words)) // self._blocks_at_a_time
        return np.repeat(windows, self._blocks)
