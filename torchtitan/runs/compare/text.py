"""Text of names and numbers on a comparison page."""

import json
from collections.abc import Sequence
from typing import Any

from torchtitan.pictures.number_text import MISSING, ends_text, short, significant
from torchtitan.runs.evaluated import is_number
from torchtitan.runs.record import Series
from torchtitan.statistics.interval import Interval


def track_name(track: str) -> str:
    return "trained weights" if track == "none" else f"EMA “{track}”"


def as_number(value: Any) -> float | None:
    return value if is_number(value) else None


def setting_text(value: Any) -> str:
    return MISSING if value is None else str(value)


def settings_text(values: Sequence[Any]) -> str:
    """Format the values of a key in the runs of a group, equal ones once."""
    texts = [
        MISSING if value is None else value if isinstance(value, str) else json.dumps(value, default=str)
        for value in values
    ]
    return ", ".join(dict.fromkeys(texts))


def value_text(value: float | None, digits: int = 4) -> str:
    return MISSING if value is None else significant(value, digits)


def count_text(value: float | None) -> str:
    if value is None:
        return MISSING
    return f"{value:,.0f}" if value < 1e7 else short(value)


def lowest_text(series: Series) -> str:
    found = series.lowest()
    return f"{significant(found[0])} at {found[1]:,}" if found else MISSING


def interval_text(interval: Interval | None) -> str:
    if interval is None:
        return MISSING
    if not interval.bounded or interval.half_width == 0:
        return significant(interval.value)
    if interval.lower > 0 >= interval.value - interval.half_width:  # of a positive quantity, by logarithms
        return ends_text(interval)
    half = significant(interval.half_width, 2)
    mantissa, _, exponent = half.partition("e-")
    decimals = len(mantissa.partition(".")[2]) + int(exponent or 0)
    return f"{interval.value:,.{decimals}f} ± {half}"
