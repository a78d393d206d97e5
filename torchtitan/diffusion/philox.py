"""Counter-based random numbers: a pure function of (seed, purpose, sample number, attempt).

Every draw that decides what a run learns (noise, timesteps, label drops, flips) comes from here, so it does
not depend on the rank, the number of ranks, the batch schedule, or whether the run was interrupted.

Source: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), Philox4x32-10.
"""

import math

import torch
from torch import Tensor

# What a draw is for. Numbers are part of the checkpoint's meaning: append, never renumber.
PURPOSES = {
    "noise": 0,
    "timestep": 1,
    "label_drop": 2,
    "horizontal_flip": 3,
    "data_order": 4,
    "stratum": 5,
    "synthetic_data": 6,
    "sampling": 7,
    "validation": 8,
    "evaluation": 9,
    "bin_order": 10,
    "gns_projection": 11,
    "posterior": 12,
    "waves": 13,
}

_ROUND_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_INCREMENTS = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF


def philox_4x32(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]) -> tuple[Tensor, ...]:
    """Apply the ten rounds of Philox4x32 to a batch of counters.

    Args:
        counter: four int64 tensors of one broadcastable shape, values in [0, 2^32).
        key: two integers in [0, 2^32).

    Returns:
        four int64 tensors of random words in [0, 2^32).
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # int64 wraps modulo 2^64, so both halves of the unsigned product are exact.
        product_0, product_1 = c0 * _ROUND_MULTIPLIERS[0], c2 * _ROUND_MULTIPLIERS[1]
        c0, c2 = ((product_1 >> 32) & _MASK) ^ c1 ^ k0, ((product_0 >> 32) & _MASK) ^ c3 ^ k1
        c1, c3 = product_1 & _MASK, product_0 & _MASK
        k0, k1 = (k0 + _KEY_INCREMENTS[0]) & _MASK, (k1 + _KEY_INCREMENTS[1]) & _MASK
    return c0, c1, c2, c3


def random_words(seed: int, purpose: str, indices: Tensor, count: int, attempt: int = 0) -> Tensor:
    """Draw `count` random 32-bit words for each index.

    Args:
        seed: the run's seed, 0 <= seed < 2^64.
        purpose: a key of PURPOSES.
        indices: sample numbers [B], int64, non-negative.
        count: words per index, 1 or more.
        attempt: changes after a rollback, so that a repeated step sees other draws, 0 <= attempt < 2^24.

    Returns:
        int64 [B, count], values in [0, 2^32), on the device of `indices`.
    """
    blocks = torch.arange(-(-count // 4), device=indices.device)[None, :]  # [1, N]
    low, high = indices[:, None] & _MASK, (indices[:, None] >> 32) & _MASK  # [B, 1]
    stream = torch.full_like(low, PURPOSES[purpose] | (attempt << 8))
    words = philox_4x32((blocks.expand(len(indices), -1), low, high, stream), (seed & _MASK, (seed >> 32) & _MASK))
    return torch.stack(torch.broadcast_tensors(*words), dim=-1).flatten(1)[:, :count]  # [B, count]


def uniform(seed: int, purpose: str, indices: Tensor, attempt: int = 0) -> Tensor:
    """One float64 uniform draw in (0, 1) per index [B]: the middles of 2^52 equal intervals."""
    words = random_words(seed, purpose, indices, 2, attempt)
    high, low = (words[:, 0] >> 6).to(torch.float64), (words[:, 1] >> 6).to(torch.float64)
    # One more bit and the highest sum would be rounded to 1.
    return (high * 2.0**26 + low + 0.5) * 2.0**-52


def normal(seed: int, purpose: str, indices: Tensor, shape: tuple[int, ...], attempt: int = 0) -> Tensor:
    """Standard normal draws, float32 [B, *shape], by the Box-Muller transform."""
    count = math.prod(shape)
    words = random_words(seed, purpose, indices, count + count % 2, attempt).to(torch.float32)
    radius = torch.sqrt(-2.0 * torch.log((words[:, 0::2] + 1.0) * 2.0**-32))
    angle = words[:, 1::2] * (2.0 * math.pi * 2.0**-32)
    pairs = torch.stack((radius * torch.cos(angle), radius * torch.sin(angle)), dim=-1)  # [B, N/2, 2]
    return pairs.flatten(1)[:, :count].reshape(len(indices), *shape)
