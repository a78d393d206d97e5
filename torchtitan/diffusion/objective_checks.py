"""Objectives whose parts do not go together."""

from collections.abc import Iterator

import torch

from torchtitan.diffusion.objective import Objective, ObjectiveConfig
from torchtitan.diffusion.paths import DDPM, PATHS
from torchtitan.diffusion.predictions import noise_error_weight

# Densities whose tails fall only as 1 / sigma and sigma, so that a weight can outgrow them.
_HEAVY_TAILED = ("uniform", "mode", "cosmap")
# ln sigma far outside of what any of them has in its middle.
_TAIL = (12.0, 14.0)


def objective_problems(config: ObjectiveConfig) -> Iterator[tuple[str, str]]:
    """Find what cannot be trained, or cannot be sampled from once trained.

    Returns:
        pairs of a dotted key and the reason.
    """
    path = PATHS[config.path]()
    if config.prediction == "noise" and path.t_max == 1.0:
        yield "objective.prediction", (
            f"the noise does not determine x0 at t = 1, where objective.path = {config.path} starts to sample"
            " (use velocity, v, x0 or edm)"
        )
    if config.preconditioning == "index" and not isinstance(path, DDPM):
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
    try:
        objective = Objective(config, seed=0)
    except ValueError as problem:
        text = f"{problem}: {config.timestep_sampler} lies beside objective.path = {config.path}"
        yield "objective.timestep_sampler", text
        return
    if config.timestep_sampler in _HEAVY_TAILED and not isinstance(path, DDPM):
        if end := _end_without_mean(objective):
            yield "objective.timestep_sampler", (
                f"{config.timestep_sampler} draws so many timesteps near {end} that objective.weighting ="
                f" {config.weighting} on objective.prediction = {config.prediction} has an infinite mean loss"
                " (use logit_normal or another weighting)"
            )


def _end_without_mean(objective: Objective) -> str:
    """The end of the path at which density x weight x squared error does not fall, or "".

    The error is what no network can avoid, 1 / (1 + sigma^2) in the noise of unit Gaussian data, or an error of 1
    in the network's own output, whichever is larger.
    """
    for end, sign in (("clean data", -1.0), ("noise", 1.0)):
        log_sigma = sign * torch.tensor(_TAIL, dtype=torch.float64)
        sigma, t = torch.exp(log_sigma), torch.sigmoid(log_sigma)
        a, _ = objective.path.coefficients(t)
        unavoidable = noise_error_weight(objective.prediction, sigma, a, objective.sigma_data) / (1.0 + sigma**2)
        error = torch.maximum(unavoidable, objective.preconditioning.scaling(t).c_out ** 2)
        density = objective.timestep_sampler.density.log_sigma_density(log_sigma)
        middle, far = (density * objective.weighting(sigma) * error).tolist()
        if far > 0.999 * middle:
            return end
    return ""
