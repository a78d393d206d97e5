"""Classifier-free guidance: labels dropped in training, two predictions combined in sampling.

Source: Ho and Salimans, "Classifier-free diffusion guidance", arXiv 2207.12598.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from torchtitan.diffusion import philox
from torchtitan.diffusion.objective import Network, Objective

# (x_t [B, ...], t [B]) -> estimates of x0 and of the noise, each of x_t's shape
Predict = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def drop_labels(labels: Tensor, null_class: int, probability: float, seed: int, indices: Tensor, attempt: int = 0):
    """Replace labels [B] by the null class with the given probability, as a function of the sample numbers."""
    dropped = philox.uniform(seed, "label_drop", indices, attempt) < probability
    return torch.where(dropped, null_class, labels)


def guided_network(model: Network, null_class: int, guidance_scale: float) -> Network:
    """A network whose output is u + guidance_scale (c - u), with c of the given class and u of the null class.

    Both come from one forward of twice the batch. guidance_scale = 1 is the plain conditional network (and one
    forward of the batch itself), 0 the unconditional one.
    """
    if guidance_scale == 1.0:
        return model

    def guided(x: Tensor, time: Tensor, condition: Tensor | None) -> Tensor:
        classes = torch.cat((condition, torch.full_like(condition, null_class)))
        conditional, unconditional = model(torch.cat((x, x)), torch.cat((time, time)), classes).float().chunk(2)
        return unconditional + guidance_scale * (conditional - unconditional)

    return guided


def predictor(
    objective: Objective, model: Network, condition: Tensor | None, null_class: int | None, guidance_scale: float
) -> Predict:
    """What a solver integrates: the objective's reading of the (guided) network for fixed classes [B]."""
    network = model if condition is None else guided_network(model, null_class, guidance_scale)
    return lambda x_t, t: objective.predict(network, x_t, t, condition)
