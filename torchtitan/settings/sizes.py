"""Sizes that multiply: products beyond 64 bits, or beyond any machine's memory, are refused before allocation."""

import math
from collections.abc import Iterator
from typing import Any, TypeGuard

from torchtitan.settings.declare import has_key

MOST_VALUES_OF_AN_IMAGE = 2**31
MOST_VALUES_OF_A_BATCH = 2**40
MOST_SAMPLES = 2**62


def size_problems(
    image_shape: tuple[int, int, int], data: Any, steps: int, local_batch_size: int, global_batch_size: int, ranks: int
) -> Iterator[tuple[str, str]]:
    """Find products beyond any run.

    Args:
        image_shape: (C, H, W) of the dataset.
        data: its section.
        steps, local_batch_size, global_batch_size: of training; a negative batch size follows from the other one.
        ranks: processes of the run.

    Returns:
        pairs of a dotted key and the reason.
    """
    values = math.prod(image_shape)
    if values > MOST_VALUES_OF_AN_IMAGE:
        key = next((key for key in ("image_size", "shape") if has_key(data, key)), "path")
        text = f"an image of {values} values is larger than {MOST_VALUES_OF_AN_IMAGE}, the most that there can be"
        yield f"data.{key}", text
        return
    if local_batch_size * values > MOST_VALUES_OF_A_BATCH:
        what = f"{local_batch_size} images of {values} values"
        yield "training.local_batch_size", f"{what} are more than {MOST_VALUES_OF_A_BATCH} values in one forward (lower it)"
    batch = max(global_batch_size, ranks * local_batch_size)
    if steps * batch > MOST_SAMPLES:
        text = f"{steps} steps of up to {batch} images are more than {MOST_SAMPLES} samples, which are numbered (lower it)"
        yield "training.steps", text


def is_count(value: Any) -> TypeGuard[int]:
    """Check whether a value is a whole number above 0, possible for processes, images or pixels."""
    return type(value) is int and 0 < value < 2**31


def largest_divisor(number: int, limit: int) -> int:
    """Largest divisor of a number, at least 1, that is at most a limit."""
    divisors = (part for low in range(1, math.isqrt(number) + 1) if number % low == 0 for part in (low, number // low))
    return max(part for part in divisors if part <= limit)
