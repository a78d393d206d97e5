"""Sections chosen by name, for tests."""

from typing import Any

from torchtitan.diffusion.heads import COMBINATIONS, CombineConfig
from torchtitan.diffusion.solvers import SCHEDULES, SOLVERS, ScheduleConfig, SolverConfig
from torchtitan.diffusion.timesteps.registry import TIMESTEPS
from torchtitan.diffusion.timesteps.sampler import TimestepsConfig
from torchtitan.diffusion.weightings import WEIGHTINGS, WeightingConfig
from torchtitan.settings import chosen

LEARNING = [name for name, section in TIMESTEPS.items() if section.learns]


def timesteps(name: str, **keys: Any) -> TimestepsConfig:
    """`[objective.timesteps]` of a name."""
    return chosen(TIMESTEPS, name, **keys)


def weighting(name: str, **keys: Any) -> WeightingConfig:
    """`[objective.weighting]` of a name."""
    return chosen(WEIGHTINGS, name, **keys)


def combine(name: str, **keys: Any) -> CombineConfig:
    """`[objective.combine]` of a name."""
    return chosen(COMBINATIONS, name, **keys)


def solver(name: str, **keys: Any) -> SolverConfig:
    """`[sampling.solver]` of a name."""
    return chosen(SOLVERS, name, **keys)


def schedule(name: str, **keys: Any) -> ScheduleConfig:
    """`[sampling.schedule]` of a name."""
    return chosen(SCHEDULES, name, **keys)
