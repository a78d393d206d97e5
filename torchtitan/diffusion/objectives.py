"""Objectives by name, and combinations of their parts that cannot be trained or sampled from."""

from collections.abc import Iterator

import torch
from torch import nn

from torchtitan.conditions import Entries
from torchtitan.diffusion.objective import Objective, ObjectiveConfig
from torchtitan.diffusion.paths import PATHS, Path
from torchtitan.diffusion.timesteps.registry import SamplerOf
from torchtitan.settings import Registry

# To add an objective: its file after the contract of Objective, and a line here.
OBJECTIVES: Registry[type[Objective]] = Registry("torchtitan.diffusion", {
    "denoising": "denoising.Denoising",
    "consistency": "consistency.Consistency",
    "mean_flow": "mean_flow.MeanFlow",
}, type[Objective])


def build_objective(config: ObjectiveConfig, seed: int, sampler_of: SamplerOf | None = None) -> Objective:
    """Build the objective of a section; arguments and errors as of `Objective`."""
    return OBJECTIVES[config.name](config, seed, sampler_of)


def attach(objective: Objective, model: nn.Module, entries: Entries) -> None:
    """Attach an objective, drawn from its seed alike on every rank and layout; raises as `Objective.attach`."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(objective.seed)
        objective.attach(model, entries)


def objective_problems(config: ObjectiveConfig) -> Iterator[tuple[str, str]]:
    """Find objectives that cannot be trained, or not sampled from: (dotted key, reason)."""
    path = PATHS[config.path]()
    if config.prediction == "noise" and path.t_max == 1.0:
        yield "objective.prediction", (
            f"the noise does not determine x0 at t = 1, where objective.path = {config.path} starts to sample"
            " (use velocity, v, x0 or edm)"
        )
    if config.preconditioning == "index" and not path.num_indices:
        yield "objective.preconditioning", f"objective.path = {config.path} has no DDPM indices (use identity)"
        return
    if config.preconditioning == "sit" and (config.path, config.prediction) != ("rectified_flow", "velocity"):
        yield "objective.preconditioning", (
            f"sit is for the velocity of the rectified flow, not objective.prediction = {config.prediction} on"
            f" objective.path = {config.path} (use identity)"
        )
    if config.preconditioning == "edm" and config.prediction not in ("x0", "edm"):
        yield "objective.preconditioning", (
            f"edm makes x0 of the network's output, not objective.prediction = {config.prediction}"
            " (set that to x0 or edm, or this to identity)"
        )
    found = [*_timesteps_problems(config, path), *OBJECTIVES[config.name].problems(config)]
    yield from found
    if found:
        return
    try:
        objective = build_objective(config, seed=0)
    except ValueError as problem:
        text = f"{problem} ({config.timesteps.name} from objective.t_min to t_max on objective.path = {config.path})"
        yield "objective.timesteps.name", text
        return
    yield from objective.problems_of_parts()


def _timesteps_problems(config: ObjectiveConfig, path: Path) -> Iterator[tuple[str, str]]:
    if config.t_min >= config.t_max:
        yield "objective.t_min", f"{config.t_min:g} is not below objective.t_max = {config.t_max:g} (no time is left)"
    for key, text in config.timesteps.problems(path, config.path):
        yield f"objective.timesteps.{key}", text
