"""Results of metrics during training: scalars, their record, and the targets that they reach first."""

import math
from collections.abc import Mapping
from typing import Any

from torchtitan.evaluation.config import EvaluationConfig
from torchtitan.fidelity.metrics import METRICS
from torchtitan.statistics.interval import Interval


def newly_reached(config: EvaluationConfig, values: Mapping[str, Interval], before: Mapping[str, Any]) -> list[str]:
    """Targets that the first metric reaches for the first time, in words, as "fid <= 5".

    EP_FID@5, the first epoch with a FID below 5, is that of "fid <= 5"; it is as exact as `evaluation.interval` allows.

    Args:
        before: targets that have been reached, by these words.

    Source of EP_FID@k: RAEv2, arXiv 2605.18324.
    """
    better = METRICS[config.metrics[0]].better
    name = next(iter(better))
    if name not in values:
        return []
    value, lower = values[name].value, better[name] == "lower"
    texts = {f"{name} {'<=' if lower else '>='} {target:g}": target for target in config.targets}
    return [
        text for text, target in texts.items()
        if text not in before and (value <= target if lower else value >= target)
    ]  # fmt: skip


def described(interval: Interval) -> dict[str, float]:
    """Value and finite ends, for JSON."""
    numbers = {"value": interval.value, "lower": interval.lower, "upper": interval.upper}
    return {name: number for name, number in numbers.items() if math.isfinite(number)}


def described_text(described: Mapping[str, float]) -> str:
    """Text of a measured value, with the ends of its interval where both are finite."""
    text = f"{described['value']:.4g}" if "value" in described else "not finite"
    return f"{text} [{described['lower']:.4g}, {described['upper']:.4g}]" if {"lower", "upper"} <= described.keys() else text


def scalars(values: Mapping[str, Interval]) -> dict[str, float]:
    """Values and finite ends by tag, for metrics.jsonl and TensorBoard."""
    return {
        f"evaluation_metrics/{name}" + ("" if part == "value" else f"_{part}"): number
        for name, interval in values.items() for part, number in described(interval).items()
    }  # fmt: skip
