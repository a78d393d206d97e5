"""Permutations without a table: the image of any place is computed from a key.

A Feistel network permutes the numbers of 2 h bits whatever its round function is (Luby and Rackoff, "How to construct
pseudorandom permutations from pseudorandom functions", 1988). A permutation of N numbers applies the network to a place
again and again until the value is below N (cycle walking: Black and Rogaway, "Ciphers with arbitrary finite domains",
2002, section 3); with 4^h < 4 N that takes less than four times on average.
"""

import numpy as np

NUM_ROUNDS = 8
# Of the finaliser of MurmurHash3 for 64 bits (Appleby), a bijection in which every bit of the input moves every one of the
# output.
_MULTIPLIERS = (np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53))
_SHIFT = np.uint64(33)


class KeyedPermutation:
    """Permutation of 0, ..., N - 1 that takes no memory."""

    def __init__(self, count: int, keys: np.ndarray) -> None:
        """count: N in 1 .. 2^62; keys: of the rounds, uint64 [NUM_ROUNDS], random."""
        self._count = count
        self._keys = keys
        bits = max((count - 1).bit_length(), 2)
        self._half = np.uint64((bits + 1) // 2)
        self._mask = np.uint64((1 << int(self._half)) - 1)

    def __call__(self, places: np.ndarray) -> np.ndarray:
        """Values at places in [0, N), int64 [B]."""
        values = self._permuted(places.astype(np.uint64))
        while len(outside := np.flatnonzero(values >= self._count)):
            values[outside] = self._permuted(values[outside])
        return values.astype(np.int64)

    def _permuted(self, values: np.ndarray) -> np.ndarray:
        left, right = values >> self._half, values & self._mask
        for key in self._keys:
            left, right = right, left ^ (_mixed(right, key) & self._mask)
        return left << self._half | right


def _mixed(words: np.ndarray, key: np.uint64) -> np.ndarray:
    """Random words, uint64 [B], of words and a key."""
    words = words ^ key
    for multiplier in _MULTIPLIERS:
        words = (words ^ (words >> _SHIFT)) * multiplier
    return words ^ (words >> _SHIFT)
