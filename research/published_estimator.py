"""Published estimator of the gradient noise scale with its two errors, for comparison only, and their correction.

With g_b and g_B mean gradients of two independent batches of b and B samples, S = tr(Sigma) and |G|^2 are estimated as

    S = (|g_b|^2 - |g_B|^2) / (1/b - 1/B),      |G|^2 = (B |g_B|^2 - b |g_b|) / (B - b),      noise scale = S / |G|^2

The correct |G|^2 has b |g_b|^2: the square is missing. And a batch is computed in sub-batches of 32, and their means are
averaged with equal weight although the last one is short, so that it counts as `effective_size` samples, not as b or B.
S is of one pair of batches, |G|^2 a mean over several pairs of which the negative draws are left out.

Source: the repository Longzz0824/Critical-Multitask-Batch-Sizes-in-Diffusion-Models and its result tables.
"""

import math
from collections.abc import Iterable, Sequence
from statistics import fmean

from research.offline_gradients import SUB_BATCH, EstimateFailed, sub_batch_sizes

COLUMNS = (
    "model", "true_portion", "diff_steps", "B", "b", "reps", "t_min", "t_max", "accumulate", "epoch", "verbose",
    "no_seed", "no_warnings", "ckpt_dir", "vis_dir", "save_fig", "date", "gns_est", "g_norm", "b_true", "runtime",
    "user", "host",
)  # fmt: skip


def effective_size(batch: int, sub_batch: int = SUB_BATCH) -> float:
    """Effective size of an equally weighted mean of the sub-batches' means, in samples: m^2 / sum of 1 / n_j over m of
    them.
    """
    sizes = sub_batch_sizes(batch, sub_batch)
    return len(sizes) ** 2 / sum(1 / size for size in sizes)


def published_estimate(
    b: int, big_b: int, noise_pair: tuple[float, float], signal_pairs: Iterable[tuple[float, float]]
) -> tuple[float, float]:
    """Compute the published estimate, errors included: for comparison only.

    Args:
        b, big_b: samples in a small and in a large batch, b < big_b.
        noise_pair: |g_b|^2 and |g_B|^2 of the pair that S is estimated from.
        signal_pairs: the same of each pair that |G|^2 is estimated from.

    Returns:
        (|G|^2, S) as published; the noise scale is their quotient S / |G|^2.

    Raises:
        EstimateFailed: S is not positive, or no draw of |G|^2 is.
    """
    noise = (noise_pair[0] - noise_pair[1]) / (1 / b - 1 / big_b)
    if noise <= 0:
        raise EstimateFailed(f"S = {noise:.3g} is not positive: the published estimator stops here")
    draws = [(big_b * large - b * math.sqrt(small)) / (big_b - b) for small, large in signal_pairs]
    positive = [draw for draw in draws if draw >= 0]
    if not positive:
        raise EstimateFailed(f"all {len(draws)} draws of |G|^2 are negative: the published estimator stops here")
    return fmean(positive), noise


# ---------------------------------------------------------------------- allocations

SOFTMAX_TEMPERATURES = (1, 2, 5, 10)


def p1_shares(noise_scales: Sequence[float]) -> list[float]:
    """Shares of the published "p1" allocation, in proportion to the bins' noise scales."""
    total = sum(noise_scales)
    return [scale / total for scale in noise_scales]


def softmax_shares(noise_scales: Sequence[float], temperature: float) -> list[float]:
    """Shares of the published "softmax T" allocation, which saturates: a noise scale has no bound, and 10 T more is
    all.
    """
    largest = max(noise_scales)
    weights = [math.exp((scale - largest) / temperature) for scale in noise_scales]
    return [weight / sum(weights) for weight in weights]
