"""Sections chosen by name, for tests."""

from typing import Any

from torchtitan.diffusion.heads import COMBINATIONS, CombineConfig
from torchtitan.diffusion.solvers import SCHEDULES, SOLVERS, ScheduleConfig, SolverConfig
from torchtitan.diffusion.timesteps.registry import TIMESTEPS
from torchtitan.diffusion.timesteps.sampler import TimestepsConfig
from torchtitan.diffusion.weightings import WEIGHTINGS, WeightingConfig

LEARNING = [name for name, section in TIMESTEPS.items() if section.learns]


def timesteps(name: str, **keys: Any) -> TimestepsConfig:
    return TIMESTEPS[name](name=name, **keys)


def weighting(name: str, **keys: Any) -> WeightingConfig:
    return WEIGHTINGS[name](name=name, **keys)


def combine(name: str, **keys: Any) -> CombineConfig:
    return COMBINATIONS[name](name=name, **keys)


def solver(name: str, **keys: Any) -> SolverConfig:
    return SOLVERS[name](name=name, **keys)


def schedule(name: str, **keys: Any) -> ScheduleConfig:
    return SCHEDULES[name](name=name, **keys)
