"""Sections of objectives for tests."""

from typing import Any

from torchtitan.diffusion.timesteps.registry import TIMESTEPS
from torchtitan.diffusion.timesteps.sampler import TimestepsConfig
from torchtitan.settings import chosen

LEARNING = [name for name, section in TIMESTEPS.items() if section.learns]


def timesteps(name: str, **keys: Any) -> TimestepsConfig:
    """`[objective.timesteps]` of a name."""
    return chosen(TIMESTEPS, name, **keys)
