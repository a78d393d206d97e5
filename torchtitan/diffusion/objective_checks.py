"""Objectives with incompatible parts."""

from collections.abc import Iterator
from typing import cast

import torch

from torchtitan.diffusion.heads import head_problems
from torchtitan.diffusion.objective import Objective, ObjectiveConfig
from torchtitan.diffusion.paths import PATHS, Path
from torchtitan.diffusion.predictions import noise_error_weight
from torchtitan.diffusion.timesteps.densities import uniform_density
from torchtitan.diffusion.timesteps.learning import LossSecondMoment
from torchtitan.diffusion.timesteps.registry import LEARNING, given_slot_edges
from torchtitan.diffusion.timesteps.slot_edges import slot_positions

# Densities whose tails fall faster than every weight grows; the others' fall as powers of sigma.
_LIGHT_TAILED = ("logit_normal", "lognormal_sigma")
# Of an index, so that ten of each are met within a million samples.
_LEAST_MASS = 1e-5
# ln sigma far outside of what any of them has in its middle.
_TAIL = (12.0, 14.0)


def objective_problems(config: ObjectiveConfig) -> Iterator[tuple[str, str]]:
    """Find objectives that cannot be trained, or not sampled from.

    Returns:
        pairs of a dotted key and the reason.
    """
    path = PATHS[config.path]()
    if config.prediction == "noise" and path.t_max == 1.0:
        yield "objective.prediction", (
            f"the noise does not determine x0 at t = 1, where objective.path = {config.path} starts to sample"
            " (use velocity, v, x0 or edm)"
        )
    if config.preconditioning == "index" and not path.num_indices:
        yield "objective.preconditioning", f"objective.path = {config.path} has no DDPM indices (use identity or edm)"
        return
    if config.preconditioning == "sit" and (config.path, config.prediction) != ("rectified_flow", "velocity"):
        yield "objective.preconditioning", (
            f"sit is for the velocity of the rectified flow, not objective.prediction = {config.prediction} on"
            f" objective.path = {config.path} (use identity)"
        )
    if config.preconditioning == "edm" and config.prediction not in ("x0", "edm"):
        yield "objective.preconditioning", (
            f"edm makes x0 of the network's output, not objective.prediction = {config.prediction} (use x0 or edm)"
        )
    found = [*head_problems(config, path), *_sampler_problems(config, path), *_unfed_problems(config)]
    yield from found
    if found:
        return
    try:
        objective = Objective(config, seed=0)
    except ValueError as problem:
        text = f"{problem}: {config.timestep_sampler} lies beside objective.path = {config.path}"
        yield "objective.timestep_sampler", text
        return
    if config.timestep_sampler == "loss_second_moment":
        masses = cast(LossSecondMoment, objective.timestep_sampler).masses
        least = masses[masses > 0].min().item()
        if least < _LEAST_MASS:
            yield "objective.base_density", (
                f"{config.base_density} draws some index once in {1 / least:.0e} samples, and loss_second_moment begins"
                " when it has seen each ten times (use uniform, or cut the range by objective.t_min and t_max)"
            )
    name = config.base_density if config.timestep_sampler in LEARNING else config.timestep_sampler
    if name not in _LIGHT_TAILED and not path.num_indices:
        if end := _end_without_mean(objective):
            yield "objective.timestep_sampler", (
                f"{name} draws so many timesteps near {end} that objective.weighting ="
                f" {config.weighting} on objective.prediction = {config.prediction} has an infinite mean loss"
                " (use logit_normal or another weighting)"
            )


def _unfed_problems(config: ObjectiveConfig) -> Iterator[tuple[str, str]]:
    if config.timestep_sampler not in LEARNING:
        return
    text = f"{config.timestep_sampler} learns from losses, which %s makes alike at all timesteps (use a density, or %s)"
    if config.learned_uncertainty:
        yield "objective.timestep_sampler", text % ("objective.learned_uncertainty", "set that to false")
    elif config.heads and config.combine == "inverse_variance":
        yield "objective.timestep_sampler", text % ("objective.combine = inverse_variance", "another combine")


def _sampler_problems(config: ObjectiveConfig, path: Path) -> Iterator[tuple[str, str]]:
    name, beside = config.timestep_sampler, f"objective.path = {config.path}"
    if config.t_min >= config.t_max:
        yield "objective.t_min", f"{config.t_min:g} is not below objective.t_max = {config.t_max:g} (no time is left)"
    if name == "loss_second_moment" and not path.discrete:
        yield "objective.timestep_sampler", (
            f"{name} keeps losses of every integer index, and {beside} has none (use ddpm_linear or ddpm_cosine, or"
            " adaptive_log_snr)"
        )
    if name == "speed" and not path.num_indices:
        yield "objective.timestep_sampler", (
            f"{name} goes by how noise grows along a DDPM's indices, and {beside} has none (use a ddpm path, or cubic)"
        )
    if name == "slots":
        yield from _slot_problems(config, path)


def _slot_problems(config: ObjectiveConfig, path: Path) -> Iterator[tuple[str, str]]:
    if config.slot_edges and config.slot_edges_path:
        yield "objective.slot_edges_path", "objective.slot_edges is given too (remove one of them)"
        return
    key = "objective.slot_edges_path" if config.slot_edges_path else "objective.slot_edges"
    indexed = path.num_indices > 0
    if not (config.slot_edges or config.slot_edges_path):
        end = f"{path.num_indices}, in indices" if indexed else "1, in t"
        yield "objective.timestep_sampler", (
            f"slots needs objective.slot_edges, rising from 0 to {end} (or objective.slot_edges_path, a file of them)"
        )
        return
    try:
        slot_positions(given_slot_edges(config, path), path, uniform_density(path))
    except ValueError as problem:
        yield key, str(problem)


def _end_without_mean(objective: Objective) -> str:
    """End of the path at which density x weight x squared error does not fall, or "".

    The error is the larger of the unavoidable one, 1 / (1 + sigma^2) in the noise of unit Gaussian data, and an error
    of 1 in the network's own output; of several heads, in that of the one with the least weight.
    """
    for end, sign in (("clean data", -1.0), ("noise", 1.0)):
        log_sigma = sign * torch.tensor(_TAIL, dtype=torch.float64)
        sigma, t = torch.exp(log_sigma), torch.sigmoid(log_sigma)
        a, _ = objective.path.coefficients(t)
        unavoidable = noise_error_weight(objective.prediction, sigma, a, objective.sigma_data) / (1.0 + sigma**2)
        own = objective.preconditioning.scaling(t).c_out ** 2
        if objective.heads is not None:
            own = objective.heads.least_conversion(log_sigma)
        error = torch.maximum(unavoidable, own)
        density = objective.timestep_sampler.density.log_sigma_density(log_sigma)
        middle, far = (density * objective.weighting(sigma) * error).tolist()
        if far > 0.999 * middle:
            return end
    return ""
