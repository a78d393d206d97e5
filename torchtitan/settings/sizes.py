"""Counts, and their divisors."""

import math
from typing import Any, TypeGuard


def is_count(value: Any) -> TypeGuard[int]:
    """Check whether a value is a whole number above 0."""
    return type(value) is int and value > 0


def largest_divisor(number: int, limit: int) -> int:
    """Largest divisor of a number, at least 1, that is at most a limit."""
    divisors = (part for low in range(1, math.isqrt(number) + 1) if number % low == 0 for part in (low, number // low))
    return max(part for part in divisors if part <= limit)
