"""Rank correlation, also of resamples that are given by how often each point is drawn."""

import numpy as np


def average_ranks(values: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Ranks of values, each drawn a number of times; equal ones share the mean of their ranks.

    Args:
        values: [n].
        counts: draws of each, [..., n].

    Returns:
        rank of each value among the draws, [..., n], the smallest 1 if drawn once.
    """
    _, group = np.unique(values, return_inverse=True)
    belongs = group[:, None] == np.arange(group.max() + 1)
    of_groups = counts @ belongs.astype(float)  # [..., groups]
    ranks = of_groups.cumsum(-1) - 0.5 * (of_groups - 1.0)
    return ranks[..., group]


def spearman(x: np.ndarray, y: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Spearman's rank correlation of points [n], each drawn counts [..., n] times; NaN where a variable is constant."""
    ranks = average_ranks(x, counts), average_ranks(y, counts)
    dx, dy = (values - drawn_mean(values, counts)[..., None] for values in ranks)
    with np.errstate(invalid="ignore", divide="ignore"):
        return drawn_mean(dx * dy, counts) / np.sqrt(drawn_mean(dx * dx, counts) * drawn_mean(dy * dy, counts))


def drawn_mean(values: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Mean of values [..., n], each drawn counts [..., n] times; NaN where nothing is drawn."""
    with np.errstate(invalid="ignore"):
        return (counts * values).sum(-1) / counts.sum(-1)
