"""Counter-based random numbers: a pure function of (seed, purpose, sample number, attempt).

Every draw that decides what a run learns (noise, timesteps, label drops, flips) comes from here, so it does
not depend on the rank, the number of ranks, the batch schedule, or whether the run was interrupted.

Source: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), Philox4x32-10.
"""

import math
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

_Number = TypeVar("_Number", int, Tensor)

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
    "dropout": 14,
    "sampled_class": 15,
    "probe": 16,
    "synthetic_text": 17,
    "stub_words": 18,
    "alignment": 19,
    "routing": 20,
    "path_drop": 21,
    "duration": 22,
    "guidance": 23,
    "second_time": 24,
    "second_tokens": 25,
}

_ROUND_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_INCREMENTS = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF
_ROUNDS = 10
# Operands as tensors, which are not made anew for every operation as Python's numbers are; usable on every device.
_LEFT_MULTIPLIER, _RIGHT_MULTIPLIER, _WORD, _HALF = (torch.tensor(n, device="cpu") for n in (*_ROUND_MULTIPLIERS, _MASK, 32))


def philox_4x32(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]) -> tuple[Tensor, ...]:
    """Apply the ten rounds of Philox4x32 to a batch of counters.

    Args:
        counter: four int64 tensors of one broadcastable shape, values in [0, 2^32).
        key: two integers in [0, 2^32).

    Returns:
        four int64 tensors of random words in [0, 2^32).
    """
    if torch.compiler.is_compiling():
        return _rounds_word_by_word(counter, key)
    first, second, third, fourth = counter
    for left_key, right_key in _round_keys(key):
        # int64 wraps modulo 2^64, so both halves of the unsigned product are exact; what is kept is masked in the next round.
        left, right = first * _LEFT_MULTIPLIER, third * _RIGHT_MULTIPLIER
        first, second = ((right >> _HALF) ^ second).bitwise_xor_(left_key).bitwise_and_(_WORD), right
        third, fourth = ((left >> _HALF) ^ fourth).bitwise_xor_(right_key).bitwise_and_(_WORD), left
    return tuple(torch.broadcast_tensors(first, second & _WORD, third, fourth & _WORD))


def random_words(seed: int, purpose: str, indices: Tensor, count: int, attempt: int = 0, first: int = 0) -> Tensor:
    """Draw `count` random 32-bit words for each index.

    Args:
        seed: the run's seed, 0 <= seed < 2^64.
        purpose: a key of PURPOSES.
        indices: sample numbers [B], int64, non-negative.
        count: words per index, 1 or more.
        attempt: changes after a rollback, so that a repeated step sees other draws, 0 <= attempt < 2^24.
        first: words of each index that precede these, a multiple of 4.

    Returns:
        int64 [B, count], values in [0, 2^32), on the device of `indices`.
    """
    counter = _counter(purpose, indices, first // 4, -(-(first + count) // 4), attempt)
    return torch.stack(philox_4x32(counter, _halves(seed)), dim=-1).flatten(1)[:, :count]  # [B, count]


def uniform(seed: int, purpose: str, indices: Tensor, attempt: int = 0) -> Tensor:
    """One float64 uniform draw in (0, 1) per index [B]: the middles of 2^52 equal intervals."""
    (bits,) = uniform_bits(seed, ((purpose, indices),), attempt)
    return middles(bits)


def uniform_bits(seed: int, draws: Sequence[tuple[str, Tensor]], attempt: int = 0) -> tuple[Tensor, ...]:
    """Draw the interval of 2^52 whose middle `uniform` returns, for draws of several purposes in one pass.

    Args:
        draws: purpose and sample numbers [B_i] of each.

    Returns:
        int64 [B_i], values in [0, 2^52), for each; they are ordered as the uniform draws are.
    """
    _, indices = zip(*draws, strict=True)
    stream = torch.cat([torch.full_like(numbers, _stream(purpose, attempt)) for purpose, numbers in draws])
    low, high = _halves(torch.cat(indices))
    first, second, _, _ = philox_4x32((torch.zeros_like(low), low, high, stream), _halves(seed))
    bits = torch.add(second >> 6, first >> 6, alpha=1 << 26)
    return bits.split(list(map(len, indices)))


def middles(bits: Tensor) -> Tensor:
    """Middles of 2^52 equal intervals of (0, 1), float64, by their number."""
    # One more bit and the highest sum would be rounded to 1.
    return (bits.to(torch.float64) + 0.5) * 2.0**-52


def normal(seed: int, purpose: str, indices: Tensor, shape: tuple[int, ...], attempt: int = 0) -> Tensor:
    """Standard normal draws, float32 [B, *shape], by the Box-Muller transform."""
    count = math.prod(shape)
    counter, key = _counter(purpose, indices, 0, -(-count // 4), attempt), _halves(seed)
    words, draws = philox_4x32(counter, key), []
    for of_radius, of_angle in (words[:2], words[2:]):
        radius = (of_radius.to(torch.float32) + 1.0).mul_(2.0**-32).log_().mul_(-2.0).sqrt_()
        angle = of_angle.to(torch.float32) * (2.0 * math.pi * 2.0**-32)
        draws += [radius * torch.cos(angle), radius * torch.sin(angle)]
    return torch.stack(draws, dim=-1).flatten(1)[:, :count].reshape(len(indices), *shape)


def _counter(purpose: str, indices: Tensor, first: int, end: int, attempt: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Counters of the blocks of four words in a range, for each index: block [N], halves of the index and stream [B, 1]."""
    low, high = _halves(indices[:, None])
    return torch.arange(first, end, device=indices.device), low, high, torch.full_like(low, _stream(purpose, attempt))


def _rounds_word_by_word(counter: tuple[Tensor, ...], key: tuple[int, int]) -> tuple[Tensor, ...]:
    """Rounds for a compiler, which makes one loop over registers of them; no product overflows."""
    first, second, third, fourth = counter
    # Inductor multiplies what it knows as an index, such as `arange`, in 32 bits, in C++ and in Triton. A mask ends that.
    first, third = first & _MASK, third & _MASK
    # A product of two words overflows int64, which C++ leaves undefined, and inductor writes C++ for the CPU. With c = m - 2^32,
    # -2^31 <= c < 0, it is m w = c w + 2^32 w, where |c w| < 2^63: its upper word is (c w >> 32) + w, of an arithmetic shift.
    of_first, of_third = (multiplier - _MASK - 1 for multiplier in _ROUND_MULTIPLIERS)
    for left_key, right_key in _round_keys(key):
        left, right = first * of_first, third * of_third
        first, second, third, fourth = (
            ((right >> 32) + third) ^ second ^ left_key,
            right & _MASK,
            ((left >> 32) + first) ^ fourth ^ right_key,
            left & _MASK,
        )
    return tuple(torch.broadcast_tensors(first, second, third, fourth))


def _stream(purpose: str, attempt: int) -> int:
    if purpose not in PURPOSES:
        advice = f"append it to PURPOSES in torchtitan/philox.py, as {max(PURPOSES.values()) + 1}"
        raise ValueError(f"{purpose!r} is no purpose of random numbers ({advice})")
    return PURPOSES[purpose] + (attempt << 8)


def _halves(number: _Number) -> tuple[_Number, _Number]:
    """Split 0 <= number < 2^64 into its lower and upper 32 bits."""
    return number & _MASK, number >> 32


def _round_keys(key: tuple[int, int]) -> list[tuple[int, int]]:
    first, second = (
        [(start + number * increment) & _MASK for number in range(_ROUNDS)]
        for start, increment in zip(key, _KEY_INCREMENTS, strict=True)
    )
    return list(zip(first, second, strict=True))
