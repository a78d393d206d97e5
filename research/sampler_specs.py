"""Specifications of timestep samplers on a command line: `name[+spread][:key=value,...]`, several with commas between.
"""

import dataclasses
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import get_args, get_type_hints

from torchtitan.config.job import JobConfig
from torchtitan.diffusion.objective import ObjectiveConfig
from torchtitan.diffusion.timesteps.registry import TIMESTEPS
from torchtitan.experiments.folder import StudyError
from torchtitan.settings.sections import keys

SPREADS: tuple[str, ...] = get_args(get_type_hints(ObjectiveConfig)["spread"])
# Of the objective, and not of how its timesteps are drawn.
_SHARED = ("shift", "t_min", "t_max")


@dataclass(frozen=True)
class SamplerSpec:
    """Sampler with its own keys.

    Attributes:
        label: in tables and pictures.
        overrides: dotted key -> text, over a base without any sampler's keys.
    """

    label: str
    overrides: dict[str, str]

    @property
    def slug(self) -> str:
        """Slug of the label, as a part of a folder's name."""
        return re.sub(r"[^A-Za-z0-9_.+=-]+", "_", self.label).strip("_")


def parse_samplers(text: str) -> list[SamplerSpec]:
    """Parse the samplers of a command line, the first of which is the reference.

    Args:
        text: such as `uniform,uniform+stratified,logit_normal:mean=0,std=1,slots:edges_path=FILE`.
            Keys are those of `[objective.timesteps]`; `shift`, `t_min` and `t_max` may be among them.

    Raises:
        StudyError: an unknown sampler or spread, text that is no such list, a key twice, or one sampler twice.
    """
    entries = _entries(text)
    specs = [_parse(entry) for entry in entries]
    meant = [_meant(spec) for spec in specs]
    for place, spec in enumerate(specs):
        if meant[place] in meant[:place]:
            raise StudyError(f"--samplers: {spec.label} is given twice")
    return _told_apart(entries, specs)


def without_sampler(config: JobConfig) -> JobConfig:
    """Base configuration with uniform timesteps, drawn independently."""
    uniform = dataclasses.replace(config.objective, timesteps=TIMESTEPS["uniform"](name="uniform"), spread="none")
    return dataclasses.replace(config, objective=uniform)


def _keys_of(name: str) -> dict[str, str]:
    """Keys of a sampler on the command line -> dotted keys."""
    found = {key.name: f"objective.timesteps.{key.name}" for key in keys(TIMESTEPS[name]()) if key.name != "name"}
    return found | {key: f"objective.{key}" for key in (*_SHARED, "spread")}


def _entries(text: str) -> list[str]:
    """Split at commas outside of brackets; a piece `key=value` belongs to the sampler before it."""
    entries: list[str] = []
    for piece in re.split(r",(?![^\[]*\])", text):
        name, equals, _ = piece.partition("=")
        if equals and ":" not in name and entries:
            entries[-1] += f",{piece}"
        else:
            entries.append(piece)
    return entries


def _meant(spec: SamplerSpec) -> dict[str, str]:
    """Normalise the overrides to one spelling for each file."""
    return {
        key: str(Path(value).resolve()) if key.endswith("_path") else value for key, value in spec.overrides.items()
    }


def _told_apart(entries: list[str], specs: list[SamplerSpec]) -> list[SamplerSpec]:
    """Distinguish files of one name by as much of their folders' names as necessary. Raises StudyError."""
    paths = [Path(path) for spec in specs for key, path in _meant(spec).items() if key.endswith("_path")]
    for parts in range(2, max((len(path.parts) for path in paths), default=0) + 1):
        names = Counter(spec.slug for spec in specs)
        specs = [
            _parse(entry, parts) if names[spec.slug] > 1 else spec for entry, spec in zip(entries, specs, strict=True)
        ]
    names = Counter(spec.slug for spec in specs)
    for spec in specs:
        if names[spec.slug] > 1:
            raise StudyError(
                f"--samplers: two that differ would both be named {spec.label} (write edges to files of other names)"
            )
    return specs


def _parse(entry: str, path_parts: int = 1) -> SamplerSpec:
    """Parse one sampler; a file appears in the label by the last parts of its path."""
    head, _, text = entry.strip().partition(":")
    name, plus, spread = head.partition("+")
    if name not in TIMESTEPS:
        raise StudyError(f"--samplers: {name!r} is no sampler (there are: {', '.join(TIMESTEPS)})")
    if plus and spread not in SPREADS:
        raise StudyError(f"--samplers: {head}: {spread!r} is no spread (there are: {', '.join(SPREADS)})")
    overrides = {"objective.timesteps.name": name} | ({"objective.spread": spread} if plus else {})
    shown = []
    known = _keys_of(name)
    for pair in filter(None, re.split(r",(?![^\[]*\])", text)):
        key, equals, value = pair.strip().partition("=")
        key = key.removeprefix("objective.").removeprefix("timesteps.")
        if not equals or key not in known:
            raise StudyError(f"--samplers: {head}: {pair!r} is no key=value of a sampler")
        if known[key] in overrides:
            raise StudyError(f"--samplers: {head}: {key} is given twice")
        overrides[known[key]] = value
        if key == "importance":
            shown += ["weighted"] if value == "true" else []
        elif key.endswith("_path"):
            shown.append(Path(*Path(value).resolve().with_suffix("").parts[-path_parts:]).as_posix())
        elif not value.startswith("["):
            shown.append(f"{key}={value}")
    return SamplerSpec(head + (f" ({', '.join(shown)})" if shown else ""), overrides)
