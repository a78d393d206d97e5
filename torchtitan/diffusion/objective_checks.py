"""Objectives with incompatible parts."""

from collections.abc import Iterator

import torch

from torchtitan.diffusion.heads import head_problems
from torchtitan.diffusion.objective import Objective, ObjectiveConfig
from torchtitan.diffusion.paths import PATHS, Path
from torchtitan.diffusion.predictions import noise_error_weight

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
    found = [*head_problems(config, path), *_timesteps_problems(config, path), *_unfed_problems(config)]
    yield from found
    if found:
        return
    try:
        objective = Objective(config, seed=0)
    except ValueError as problem:
        text = f"{problem}: {config.timesteps.name} lies beside objective.path = {config.path}"
        yield "objective.timesteps.name", text
        return
    for key, text in config.timesteps.sampler_problems(objective.timestep_sampler):
        yield f"objective.timesteps.{key}", text
    density = config.timesteps.of_density()
    # Others' tails fall as powers of sigma.
    if not density.light_tailed and not path.num_indices:
        if end := _end_without_mean(objective):
            yield "objective.timesteps.name", (
                f"{density.name} draws so many timesteps near {end} that objective.weighting.name ="
                f" {config.weighting.name} on objective.prediction = {config.prediction} has an infinite mean loss"
                " (use logit_normal or another weighting)"
            )


def _unfed_problems(config: ObjectiveConfig) -> Iterator[tuple[str, str]]:
    if not config.timesteps.learns:
        return
    text = f"{config.timesteps.name} learns from losses, which %s makes alike at all timesteps (use a density, or %s)"
    if config.learned_uncertainty:
        yield "objective.timesteps.name", text % ("objective.learned_uncertainty", "set that to false")
    elif config.heads and config.combine.name == "inverse_variance":
        yield "objective.timesteps.name", text % ("objective.combine.name = inverse_variance", "another name")


def _timesteps_problems(config: ObjectiveConfig, path: Path) -> Iterator[tuple[str, str]]:
    if config.t_min >= config.t_max:
        yield "objective.t_min", f"{config.t_min:g} is not below objective.t_max = {config.t_max:g} (no time is left)"
    for key, text in config.timesteps.problems(path, config.path):
        yield f"objective.timesteps.{key}", text


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
