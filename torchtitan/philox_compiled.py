"""Philox for compilers: word by word, so that a whole draw is one loop over registers, and without overflow."""

import math

import torch
from torch import Tensor

_WORD = 2**32
_MASK = _WORD - 1


def rounds(
    counter: tuple[Tensor, ...], multipliers: tuple[int, int], keys: list[tuple[int, int]]
) -> tuple[Tensor, ...]:
    """Apply the rounds of Philox4x32 to a batch of counters, as `torchtitan.philox.philox_4x32` does.

    Args:
        counter: four int64 tensors of broadcastable shapes, values in [0, 2^32).
        multipliers: of the rounds, in [2^31, 2^32).
        keys: two words of each round.

    Returns:
        four int64 tensors of values in [0, 2^32), of one shape.
    """
    first, second, third, fourth = counter
    # Inductor multiplies what it knows as an index, such as `arange`, in 32 bits, in C++ and in Triton. A mask ends that.
    first, third = first & _MASK, third & _MASK
    # A product of two words overflows int64, which C++ leaves undefined, and inductor writes C++ for the CPU. With c = m - 2^32,
    # -2^31 <= c < 0, it is m w = c w + 2^32 w, where |c w| < 2^63: its upper word is (c w >> 32) + w, of an arithmetic shift.
    of_first, of_third = (multiplier - _WORD for multiplier in multipliers)
    for left_key, right_key in keys:
        left, right = first * of_first, third * of_third
        first, second, third, fourth = (
            ((right >> 32) + third) ^ second ^ left_key,
            right & _MASK,
            ((left >> 32) + first) ^ fourth ^ right_key,
            left & _MASK,
        )
    return tuple(torch.broadcast_tensors(first, second, third, fourth))


def normal_of_words(words: tuple[Tensor, ...]) -> Tensor:
    """Normal draws of four words [B, N] of each block: float32 [B, 4 N], in the order of the words."""
    draws = []
    for of_radius, of_angle in (words[:2], words[2:]):
        radius = torch.sqrt(-2.0 * torch.log((of_radius.to(torch.float32) + 1.0) * 2.0**-32))
        angle = of_angle.to(torch.float32) * (2.0 * math.pi * 2.0**-32)
        draws += [radius * torch.cos(angle), radius * torch.sin(angle)]
    return torch.stack(draws, dim=-1).flatten(1)
