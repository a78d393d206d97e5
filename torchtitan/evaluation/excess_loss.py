"""Excess loss of a network over the optimal loss, on fixed noisy training images.

The optimal loss at a noise level is that of the posterior mean over the training set, below which no function of the noisy
image (and the class) comes in expectation. With y the target, f the network's prediction and m the optimal one,

    E[|y - f|^2 - |y - m|^2 | x_t] = |f - m|^2,

so the excess is measured as the squared distance |f - m|^2: the same expectation as the difference of the two losses on
the same draws, never negative, and without the variance of y. The optimal loss |y - m|^2 is likewise replaced by its
expectation given x_t, the variance of the posterior. Source of both: the Rao-Blackwell theorem.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from torchtitan.conditions import each_tensor
from torchtitan.diffusion.objective import Objective
from torchtitan.diffusion.paths import per_image
from torchtitan.diffusion.predictions import PREDICTIONS, target, x0_error_factor
from torchtitan.distributed.precision import compute_context
from torchtitan.evaluation.eval_mode import evaluating
from torchtitan.evaluation.optimal_draws import OptimalDraws
from torchtitan.evaluation.validation import MeansByTime
from torchtitan.models.base import DiffusionModel
from torchtitan.training.data_loading import equal_shares

NAMES = ("excess_loss", "optimal_loss", "training_loss")


def optimal_prediction(objective: Objective, draws: OptimalDraws) -> tuple[Tensor, Tensor]:
    """Optimal prediction of noisy images, and its expected squared error given each of them.

    Returns:
        float64 [M, C, H, W] and [M], in the objective's prediction.
    """
    x0, noise = draws.batch["images"].to(torch.float64), draws.draw.noise.to(torch.float64)
    a, b = objective.path.coefficients(draws.draw.t.to(torch.float64))
    factor = x0_error_factor(objective.prediction, a, b, objective.sigma_data)
    wanted = target(objective.prediction, x0, noise, per_image(a, x0), per_image(b, x0), objective.sigma_data)
    _, q = PREDICTIONS[objective.prediction](a, b, objective.sigma_data)
    # A clean image, b = 0, tells nothing of the noise: its estimate is 0, and the error 1.
    unknown = torch.where(b > 0, 0.0, q)
    mean = wanted + per_image(factor, x0) * (draws.posterior.mean.to(torch.float64) - x0) - per_image(unknown, x0) * noise
    return mean, factor**2 * draws.posterior.variance + unknown**2


@torch.no_grad()
def excess_loss(
    model: DiffusionModel,
    objective: Objective,
    draws: OptimalDraws,
    *,
    batch_size: int,
    rank: int,
    world_size: int,
    bin_edges: Tensor,
    param_dtype: str,
    device: torch.device,
    sharded: bool,
    timesteps: Sequence[float] = (),
) -> dict[str, float]:
    """Excess, optimal and training loss on fixed draws, whole and by timestep; called by all ranks together.

    Args:
        model, objective, bin_edges, param_dtype, device, sharded, timesteps: as of `validation_loss`.
        draws: of training images.
        batch_size: images at a time on each rank.
        rank, world_size: of this process.

    Returns:
        means and standard errors of `NAMES`, under tags as those of `validation_loss`: the excess over the optimal loss, the
        optimal loss, and the network's loss, which has the sum of both as its expectation. The whole is weighted, without
        what a learned variance adds; bins have the plain squared error.
    """
    optimal, least = optimal_prediction(objective, draws)
    means = MeansByTime(NAMES, bin_edges, timesteps, device)
    with evaluating(model):
        for places, held in equal_shares(len(draws), batch_size, rank, world_size):
            chosen = torch.from_numpy(places)
            x0, noise, t = (each[chosen].to(device) for each in (draws.batch["images"], draws.draw.noise, draws.draw.t))
            batch = {name: values[chosen] for name, values in draws.batch.items()}
            condition = each_tensor(model.condition_kind.of(batch), lambda value: value.to(device))
            a, b = (per_image(c, x0) for c in objective.path.coefficients(t))
            with compute_context(param_dtype, device, sharded):
                found = objective.predicted(model, a * x0 + b * noise, t, condition)
            wanted = target(objective.prediction, x0, noise, a, b, objective.sigma_data)
            weight = objective.weighting(t / (1.0 - t).clamp_min(torch.finfo(torch.float32).tiny))
            values = (_error(found, optimal[chosen].to(device)), least[chosen].to(device), _error(found, wanted))
            weights = torch.from_numpy(held).to(device)
            losses = {name: (each, weight * each) for name, each in zip(NAMES, values, strict=True)}
            means.add(chosen.to(device), t, weights, losses)
    return means.metrics()


def _error(found: Tensor, wanted: Tensor) -> Tensor:
    """Mean squared error of each image, [B]."""
    return (found - wanted).square().flatten(1).mean(1)
