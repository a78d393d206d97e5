"""Classifier-free guidance: conditions dropped in training, two predictions combined in sampling.

Source: Ho and Salimans, "Classifier-free diffusion guidance", arXiv 2207.12598.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from torchtitan.conditions import Condition, ConditionKind
from torchtitan.diffusion.objective import Network, Objective
from torchtitan.diffusion.solvers.contract import Predict


@dataclass(frozen=True)
class Guidance:
    """Guidance of samples: scale, interval and channels.

    Attributes:
        scale: 1 is the plain conditional network, 0 the unconditional one.
        interval: times (low, high), both within, of guidance; outside it the network is the plain conditional one.
            Source: Kynkäänniemi et al., arXiv 2404.07724 (there in sigma = t / (1 - t)).
        channels: "all" of the image, or the "first_three" as in the published samples of DiT (Peebles and Xie, arXiv
            2212.09748); the other channels, and always a learned variance, are the conditional network's.
    """

    scale: float = 1.0
    interval: tuple[float, float] = (0.0, 1.0)
    channels: str = "all"


def guided_network(model: Network, kind: ConditionKind, scale: float, channels: str = "all") -> Network:
    """Guide a network: its output becomes u + scale (c - u), with c of the given and u of the null condition.

    Both come from one forward of twice the batch. scale = 1 is the plain conditional network (and one forward of the
    batch itself), 0 the unconditional one. Channels that are not guided (see `Guidance`) are c's.
    """
    if scale == 1.0:
        return model

    def guided(x: Tensor, time: Tensor, condition: Condition) -> Tensor:
        both = kind.with_null(condition)
        conditional, unconditional = model(torch.cat((x, x)), torch.cat((time, time)), both).float().chunk(2)
        count = min(x.shape[1], 3) if channels == "first_three" else x.shape[1]
        c, u = conditional[:, :count], unconditional[:, :count]
        return torch.cat((u + scale * (c - u), conditional[:, count:]), dim=1)

    return guided


def predictor(
    objective: Objective, model: Network, kind: ConditionKind, condition: Condition, guidance: Guidance
) -> Predict:
    """Predictor for a solver: the (guided) network's estimates for fixed conditions, as read by the objective.

    Args:
        objective: of the network's training.
        model: the network.
        kind: of its conditions.
        condition: of each image, or None for an unconditional network, which is never guided.
        guidance: all times of one call must be equal, for they are within the interval together.
    """
    if condition is None:
        return lambda x_t, t: objective.predict_with_variance(model, x_t, t, None)
    guided = guided_network(model, kind, guidance.scale, guidance.channels)
    low, high = guidance.interval
    if guided is model or (low <= 0.0 and high >= 1.0):
        return lambda x_t, t: objective.predict_with_variance(guided, x_t, t, condition)

    def predict(x_t: Tensor, t: Tensor):
        network = guided if low <= t[0].item() <= high else model
        return objective.predict_with_variance(network, x_t, t, condition)

    return predict
