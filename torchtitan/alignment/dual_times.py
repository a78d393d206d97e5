"""Two times in one image: a share of its tokens, chosen at random, is at a second time, drawn as the first.

The network is then conditioned token by token, and its average teaches at lower times of both groups. Sources: Self-Flow, arXiv
2603.06507; arXiv 2607.02508, without separated attention.
"""

import torch
from torch import Tensor

from torchtitan import philox
from torchtitan.diffusion.objective import Draw, Objective


def with_second_time(
    draw: Draw, objective: Objective, samples: Tensor, attempt: int, share: float, grid: tuple[int, int]
) -> Draw:
    """Draw with times by token: of sample numbers [B], that share of an image's tokens on a grid at a second time."""
    tokens = grid[0] * grid[1]
    second = objective.timestep_sampler.density.quantile(philox.uniform(objective.seed, "second_time", samples, attempt))
    order = philox.random_words(objective.seed, "second_tokens", samples, tokens, attempt).argsort(1).argsort(1)
    times = torch.where(order < round(share * tokens), second.to(draw.t)[:, None], draw.t[:, None])  # [B, T]
    return draw._replace(token_times=times.unflatten(1, grid)[:, None])


def lowered(draw: Draw, first: Tensor, second: Tensor) -> Tensor:
    """Times of a draw lower by `first` [B], those of the second group by `second` [B], 0 at least: [B], or as by token."""
    if draw.token_times is None:
        return (draw.t - first).clamp_min(0.0)
    of_images = draw.t[:, None, None, None]
    gap = torch.where(draw.token_times == of_images, first[:, None, None, None], second[:, None, None, None])
    return (draw.token_times - gap).clamp_min(0.0)
