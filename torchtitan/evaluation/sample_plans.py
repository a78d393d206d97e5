"""Plans of sets of samples: seeds, the condition of each, and a record of all that the images depend on."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from torchtitan import philox

MOST_IMAGES = 10_000_000
SEEDS_END = 1 << 40  # above are the numbers of the noise that solvers add
# Of philox: an image's own seed is its number there.
KEY = 0


class SampleSetError(ValueError):
    """Set of samples that cannot be drawn; the message is one line: the cause and the remedy."""


class SampleNotFinite(SampleSetError):
    """Image with values that are not finite; raised on the rank that drew it alone."""


@dataclass(frozen=True)
class SetPlan:
    """Plan of a set: the image of a seed is a function of the seed, its choice and the settings.

    Batches are cut by the seeds' places, so that they are the same on any number of processes and after any kill.

    Attributes:
        seeds: int64 [N], each once.
        choices: numbers of their conditions, int64 [N]; None for a model without.
        settings: whatever else the images depend on, for JSON.
        prompts: texts of the choices; none where they are classes.
    """

    seeds: Tensor
    choices: Tensor | None
    batch_size: int
    settings: Mapping[str, Any]
    prompts: Sequence[str] = ()

    @property
    def num_batches(self) -> int:
        return -(-len(self.seeds) // self.batch_size)

    def batch(self, number: int) -> tuple[Tensor, Tensor]:
        """Seeds and choices (0 for a model without conditions) of a batch, each [B]."""
        places = slice(number * self.batch_size, (number + 1) * self.batch_size)
        seeds = self.seeds[places]
        return seeds, torch.zeros_like(seeds) if self.choices is None else self.choices[places]

    def record(self) -> dict[str, Any]:
        """Record of the plan, for JSON; equal for two plans of the same images."""
        return {
            "images": len(self.seeds),
            "seeds": seeds_text(self.seeds.tolist()),
            "choices": None if self.choices is None else _sha256(self.choices),
            "batch_size": self.batch_size,
            **self.settings,
        }


def read_seeds(text: str | None, count: int | None) -> Tensor:
    """Read `--seeds` and `--count`: ranges and numbers with commas between, as 0-49999; a count alone is 0 to count - 1.

    Returns:
        int64 [N], in the given order.

    Raises:
        SampleSetError: no such list, a seed twice, or another number of them than the count.
    """
    if count is not None and not 1 <= count <= MOST_IMAGES:
        raise SampleSetError(f"--count: must be in 1..{MOST_IMAGES}, is {count}")
    if text is None:
        return torch.arange(count or 0)
    parts = [_range(part) for part in text.split(",")]
    if sum(map(len, parts)) > MOST_IMAGES:
        raise SampleSetError(f"--seeds: {sum(map(len, parts))} are more than {MOST_IMAGES} (draw several sets)")
    seeds = torch.cat([torch.arange(part.start, part.stop) for part in parts])
    if len(unique := seeds.unique(return_counts=True)[1]) < len(seeds):
        twice = seeds.unique()[unique > 1][0].item()
        raise SampleSetError(f"--seeds: {twice} is given twice (leave it out once)")
    if count not in (None, len(seeds)):
        raise SampleSetError(f"--count: {count}, but --seeds {text[:60]} are {len(seeds)} (give one of the two)")
    return seeds


def seeds_text(seeds: Sequence[int]) -> str:
    """Text of seeds as `read_seeds` reads it, neighbours as ranges."""
    places = np.flatnonzero(np.diff(seeds) != 1) + 1
    runs = np.split(np.asarray(seeds), places)
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def choices_of(seeds: Tensor, count: int, given: Sequence[int]) -> Tensor | None:
    """Choices of conditions for seeds [N], int64 [N] or None, each a function of its seed alone.

    Args:
        count: number of choices that there are; 0: the model has no conditions.
        given: choices to cycle through, seed 0 having the first; none: each seed's is drawn, all being as likely.
    """
    if not count:
        return None
    if given:
        return torch.tensor(list(given))[seeds % len(given)]
    return (philox.uniform(KEY, "sampled_class", seeds) * count).long().clamp(max=count - 1)


def classes_text(record: Mapping[str, Any]) -> str:
    """Choice of a recorded plan's classes, in words; "" where each is drawn by its seed, or there are none."""
    count, found = record.get("num_classes"), record.get("choices")
    if not (count and found):
        return ""
    seeds = read_seeds(record["seeds"], None)
    ways: dict[str, list[int]] = {"": [], ", classes by turns": [*range(count)]}
    said = (text for text, given in ways.items() if _sha256(cast(Tensor, choices_of(seeds, count, given))) == found)
    return next(said, f", other classes ({found[:6]})")


def _range(part: str) -> range:
    match = re.fullmatch(r"\s*(\d{1,15})(?:-(\d{1,15}))?\s*", part)
    if match is None:
        raise SampleSetError(f"--seeds: {part[:40]!r} is no seed or range of seeds (as 0-49999 or 1,5,10-19)")
    first = int(match[1])
    last = int(match[2]) if match[2] else first
    if last < first:
        raise SampleSetError(f"--seeds: {part.strip()} runs backwards (give the lower seed first)")
    if last >= SEEDS_END:
        raise SampleSetError(f"--seeds: {last} is not in 0..2^40 - 1")
    return range(first, last + 1)


def _sha256(values: Tensor) -> str:
    return hashlib.sha256(values.numpy().astype("<i8").tobytes()).hexdigest()
