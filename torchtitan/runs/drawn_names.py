"""Names of drawn pictures, by the weights and the options that they were drawn with."""

import argparse
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from torchtitan.runs.trained_model import TrainedModel

# Options that are in the name already, or change no picture of it.
_NOT_NAMED = (
    "source", "step", "ema", "seed", "output", "files", "latents", "batch_size", "set", "count", "seeds", "format",
)  # fmt: skip
_LONGEST_VALUE, _LONGEST_NAME = 24, 120


def drawn_name(arguments: argparse.Namespace, trained: TrainedModel, defaults: Mapping[str, Any]) -> str:
    """Name of pictures: step, track, options that were given, and seed; other settings have another name.

    Args:
        arguments: the options, their classes as numbers.
        trained: the model; a file of weights has neither step nor track.
        defaults: option -> value that is not named.

    Returns:
        as `step-200-ema-guidance_scale-3-seed-0`; long options as the first digits of their SHA-256.
    """
    origin = [f"step-{trained.step}"] if trained.step is not None else []
    origin += [trained.track] if trained.track else []
    usual = trained.info.condition_kind.numbers_of(trained.config.sampling.classes)
    options = "-".join(_given(arguments, {"classes": usual, **defaults}))
    if len(options) > _LONGEST_NAME:
        options = f"options-{_digest(options)}"
    return "-".join(filter(None, [*origin, options, f"seed-{arguments.seed}"]))


def _given(arguments: argparse.Namespace, defaults: Mapping[str, Any]) -> Iterator[str]:
    for name, value in sorted(vars(arguments).items()):
        unnamed = name in _NOT_NAMED or (name == "classes" and arguments.prompt)  # a prompt each
        if unnamed or value is None or value in ("", []) or value == defaults.get(name):
            continue
        words = [_text(each) for each in (value if isinstance(value, list) else [value])]
        text = ",".join(words)
        short = len(text) <= _LONGEST_VALUE and all(re.fullmatch(r"[A-Za-z0-9.+-]+", word) for word in words)
        yield f"{name}-{text if short else _digest(value)}"


def _text(value: Any) -> str:
    return str(value).removesuffix(".0") if isinstance(value, float) else str(value)


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, default=str).encode()).hexdigest()[:8]
