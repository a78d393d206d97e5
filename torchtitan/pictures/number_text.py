"""Numbers as pages and reports write them."""

import math
from collections.abc import Sequence

from torchtitan.statistics.interval import Interval

MISSING = "–"


def short(value: float) -> str:
    """Format a number on an axis: 20k, 1.5M, 0.02, 1e-4."""
    size = abs(value)
    for factor, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= factor * (10 if letter == "k" else 1):
            return f"{value / factor:.4g}{letter}"
    text = f"{value:.4g}"
    mantissa, exponent, power = text.partition("e")
    return f"{mantissa}e{int(power)}" if exponent else text


def significant(value: float, digits: int = 4) -> str:
    """Format a number with so many significant digits, whole ones with thousands separated."""
    if value == 0:
        return "0"
    size = math.floor(math.log10(abs(value)))
    if size >= 15 or size < -4:
        return short(float(f"{value:.{digits}g}"))
    return f"{round(value, digits - 1 - size):,.{max(0, digits - 1 - size)}f}"


def counted(count: int, noun: str, plural: str = "s") -> str:
    """Format a count of things: `1 run`, `2 runs`, with thousands separated; `plural` is the noun's ending."""
    return f"{count:,} {noun}{'' if count == 1 else plural}"


def first_named(names: Sequence[str], most: int) -> str:
    """Name the first of many: `a, b and 3 more`."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def ends_text(estimate: Interval | None) -> str:
    """Format an estimate with the ends of its interval: `1,234 [1,200, 1,260]`."""
    if estimate is None:
        return MISSING
    if not estimate.bounded:
        return significant(estimate.value)
    return f"{significant(estimate.value)} [{significant(estimate.lower)}, {significant(estimate.upper)}]"
