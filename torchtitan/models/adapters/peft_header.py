"""Scales of an adapter as a JSON object of peft's LoraConfig: diffusers' header entry, or peft's adapter_config.json.

In the header each key may have the prefix of the network, as `transformer.lora_alpha`; `alpha_pattern` gives some layers other
alphas.
Source: diffusers' loaders/lora_base.py and peft's tuners/lora/config.py, for facts.
"""

import json
import math
import re
from dataclasses import dataclass
from typing import Any

from torchtitan.models.adapters.target import AdapterError

KEY, FILE = "lora_adapter_metadata", "adapter_config.json"


@dataclass(frozen=True)
class PeftScales:
    """Scales of an adapter's layers.

    Attributes:
        alpha: of layers without a pattern.
        patterns: ending of a layer's name, or with a caret the whole of it -> alpha; the first that fits counts.
        by_root: whether the scale is alpha / sqrt(rank) instead of alpha / rank.
    """

    alpha: float
    patterns: dict[str, float]
    by_root: bool

    def alpha_of(self, layer: str, rank: int) -> float:
        """Alpha of a layer for which the scale is alpha / rank."""
        found = next((alpha for pattern, alpha in self.patterns.items() if _fits(pattern, layer)), self.alpha)
        return found * math.sqrt(rank) if self.by_root else found


def read_scales(text: str, prefix: str, place: str = f"its header's {KEY}") -> PeftScales | None:
    """Read the object; None if it says nothing of that prefix, as `transformer.`. Messages name its place.

    Raises:
        AdapterError: it is damaged, or describes another update than alpha / rank B A.
    """
    try:
        document = json.loads(text)
        config = {key.removeprefix(prefix): value for key, value in document.items() if key.startswith(prefix)}
    except (ValueError, AttributeError, RecursionError) as error:
        raise AdapterError(f"{place} is no JSON object") from error
    if not config:
        return None
    for key in ("use_dora", "lora_bias", "use_qalora"):
        if config.get(key):
            raise AdapterError(f"{place} says {key}: this program has adapters W + s B A alone")
    patterns = config.get("alpha_pattern") or {}
    if not isinstance(patterns, dict) or not all(re.fullmatch(r"\^?[\w.]+", key) for key in patterns):
        raise AdapterError(f"{place} has an alpha_pattern that is no list of layers")
    alphas = {key: _number(value, place) for key, value in patterns.items()}
    return PeftScales(_number(config.get("lora_alpha"), place), alphas, bool(config.get("use_rslora")))


def _number(value: Any, place: str) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise AdapterError(f"{place} gives {str(value)[:40]!r} as an alpha")
    return float(value)


def _fits(pattern: str, layer: str) -> bool:
    if pattern.startswith("^"):
        return layer == pattern[1:]
    return layer == pattern or layer.endswith("." + pattern)
