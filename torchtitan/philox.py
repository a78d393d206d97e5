"""Counter-based random numbers: a pure function of (seed, purpose, sample number, attempt).

Every draw that decides what a run learns (noise, timesteps, label drops, flips) comes from here, so it does
not depend on the rank, the number of ranks, the batch schedule, or whether the run was interrupted.

On a CPU the rounds are NumPy's operations, elsewhere and in compiled code torch's; the words are the same. NumPy reads and
writes the halves of a 64-bit product where they are, as numbers of 32 bits, so a round is a product, an exclusive or of
halves and another with the key; and on a few numbers its operations take a third of torch's time.

Source: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), Philox4x32-10.
"""

import functools
import math
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
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
_BLOCKS_IN_CACHE = 2**13  # of four words
_MULTIPLIERS = np.array(_ROUND_MULTIPLIERS, np.uint64)
# Operands as tensors, which are not made anew for every operation as Python's numbers are; usable on every device.
_MASK_OPERAND, _HALF_OPERAND = torch.tensor(_MASK, device="cpu"), torch.tensor(32, device="cpu")


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
    if _by_numpy(counter[1]):
        even, odd = _rounds_by_numpy(counter, key)
        (word_0, word_2), (word_1, word_3) = torch.from_numpy(even.view(np.int64)), torch.from_numpy(odd.astype(np.int64))
        return word_0, word_1, word_2, word_3
    words = torch.stack(torch.broadcast_tensors(*counter))  # [4, *]
    multiplied, mixed_in = words[0::2], words[1::2]  # [2, *]: words 0 and 2, 1 and 3
    multipliers, round_keys = (_per_row(constants, words) for constants in _constants(key, words.device))
    for round_key in round_keys:
        # int64 wraps modulo 2^64, so both halves of the unsigned product are exact. The two change places.
        product = (multiplied * multipliers).flip(0)
        upper = (product >> _HALF_OPERAND).bitwise_xor_(mixed_in).bitwise_xor_(round_key)
        multiplied = upper.bitwise_and_(_MASK_OPERAND)
        mixed_in = product  # whose upper half the mask of the next round takes away
    mixed_in = mixed_in & _MASK
    return multiplied[0], mixed_in[0], multiplied[1], mixed_in[1]


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
    if torch.compiler.is_compiling():
        draws = _normal_of_words(philox_4x32(counter, key))
    elif _by_numpy(indices):
        draws = _normal_by_numpy(counter, key)
    else:
        words = torch.stack(philox_4x32(counter, key), dim=-1).flatten(1).to(torch.float32)
        radius, angle = _polar(words[:, 0::2], words[:, 1::2])
        draws = torch.stack((radius * torch.cos(angle), radius * torch.sin(angle)), dim=-1).flatten(1)
    return draws[:, :count].reshape(len(indices), *shape)


def _counter(purpose: str, indices: Tensor, first: int, end: int, attempt: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Counters of the blocks of four words in a range, for each index: block [N], halves of the index and stream [B, 1]."""
    low, high = _halves(indices[:, None])
    return torch.arange(first, end, device=indices.device), low, high, torch.full_like(low, _stream(purpose, attempt))


def _normal_by_numpy(counter: Sequence[Tensor], key: tuple[int, int]) -> Tensor:
    """Normal draws of a counter: four of each block [N] for each index [B, 1], float32 [B, 4 N]."""
    blocks, low, high, stream = counter
    draws = np.empty((len(low), len(blocks), 2, 2), np.float32)  # two pairs of each block
    # In pieces, whose words stay in the cache and are too few for torch to divide among busy cores.
    rows = max(1, _BLOCKS_IN_CACHE // max(len(blocks), 1))
    for row in range(0, len(low), rows):
        here = slice(row, row + rows)
        even, odd = _rounds_by_numpy((blocks, low[here], high[here], stream[here]), key)
        radii, angles = even.view(np.int64).astype(np.float32), odd.astype(np.float32)
        radius, angle = _polar(torch.from_numpy(radii), torch.from_numpy(angles))  # [2, rows, blocks]
        piece = draws[here].transpose(3, 2, 0, 1)
        np.multiply(radius.numpy(), torch.cos(angle).numpy(), out=piece[0])
        np.multiply(radius.numpy(), angle.sin_().numpy(), out=piece[1])
    return torch.from_numpy(draws).flatten(1)


def _polar(radii: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
    """Radius and angle of each point of the Box-Muller transform, from words rounded to float32."""
    return (radii + 1.0).mul_(2.0**-32).log_().mul_(-2.0).sqrt_(), angles * (2.0 * math.pi * 2.0**-32)


def _by_numpy(numbers: Tensor) -> bool:
    """Whether to use NumPy's operations: on plain numbers in a CPU's memory."""
    return type(numbers) is Tensor and numbers.device.type == "cpu"


def _rounds_by_numpy(counter: Sequence[Tensor], key: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Apply the ten rounds by NumPy's operations, to counters of `philox_4x32` of one dimension or more, that broadcast to [*].

    Returns:
        words 0 and 2, uint64 [2, *]; words 1 and 3, uint32 [2, *].
    """
    counts = [*map(Tensor.numpy, counter)]
    shape = np.broadcast(*counts).shape
    words, products = np.empty((2, *shape), np.uint64), np.empty((2, 2, *shape), np.uint64)  # two products, used in turn
    lower_of_words, halves = words.view(np.uint32)[..., 0::2], products[:, ::-1].view(np.uint32)
    lower, upper = halves[..., 0::2], halves[..., 1::2]  # the two products of a round change places
    mixed_in = lower[1]
    words[0], mixed_in[0], words[1], mixed_in[1] = counts
    per_row = (2, *[1] * len(shape))
    multipliers = _MULTIPLIERS.reshape(per_row)
    for number, round_key in enumerate(_key_array(key).reshape(-1, *per_row)):
        np.multiply(words, multipliers, out=products[number % 2])
        np.bitwise_xor(upper[number % 2], mixed_in, out=lower_of_words)  # the upper halves stay 0
        np.bitwise_xor(words, round_key, out=words)
        mixed_in = lower[number % 2]
    return words, mixed_in


@functools.lru_cache
def _key_array(key: tuple[int, int]) -> np.ndarray:
    """Keys of the rounds, uint64 [10, 2]."""
    return np.array(_round_keys(key), np.uint64)


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


def _normal_of_words(words: tuple[Tensor, ...]) -> Tensor:
    """Normal draws of four words [B, N] of each block: float32 [B, 4 N], in the order of the words."""
    draws = []
    for of_radius, of_angle in (words[:2], words[2:]):
        radius = torch.sqrt(-2.0 * torch.log((of_radius.to(torch.float32) + 1.0) * 2.0**-32))
        angle = of_angle.to(torch.float32) * (2.0 * math.pi * 2.0**-32)
        draws += [radius * torch.cos(angle), radius * torch.sin(angle)]
    return torch.stack(draws, dim=-1).flatten(1)


def _stream(purpose: str, attempt: int) -> int:
    if purpose not in PURPOSES:
        advice = f"append it to PURPOSES in torchtitan/philox.py, as {max(PURPOSES.values()) + 1}"
        raise ValueError(f"{purpose!r} is no purpose of random numbers ({advice})")
    return PURPOSES[purpose] + (attempt << 8)


def _halves(number: _Number) -> tuple[_Number, _Number]:
    """Split 0 <= number < 2^64 into its lower and upper 32 bits."""
    return number & _MASK, number >> 32


def _constants(key: tuple[int, int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Multipliers [2] and round keys [10, 2], these up to multiples of 2^32."""
    # Made on the device, since a copy from the host would wait for it.
    first, second = _ROUND_MULTIPLIERS
    multipliers = torch.arange(first, 2 * second - first, second - first, device=device)
    columns = [
        torch.arange(start, start + _ROUNDS * increment, increment, device=device)
        for start, increment in zip(key, _KEY_INCREMENTS, strict=True)
    ]
    return multipliers, torch.stack(columns, dim=1)


def _round_keys(key: tuple[int, int]) -> list[tuple[int, int]]:
    first, second = (
        [(start + number * increment) & _MASK for number in range(_ROUNDS)]
        for start, increment in zip(key, _KEY_INCREMENTS, strict=True)
    )
    return list(zip(first, second, strict=True))


def _per_row(constants: Tensor, words: Tensor) -> Tensor:
    """View constants [..., 2] so that they broadcast over words [2, *]."""
    return constants.view(*constants.shape, *([1] * (words.ndim - 1)))
