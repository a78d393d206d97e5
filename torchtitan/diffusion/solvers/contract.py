"""Contract of solvers: predictions of the clean image and the noise, and fresh noise."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from torchtitan.diffusion.paths import Path


class Prediction(NamedTuple):
    """Prediction: estimates from x_t = a x0 + b noise by a network.

    Attributes:
        x0, noise: estimates, of x_t's shape, with a x0 + b noise = x_t.
        variance_fraction: learned variance of the reverse step, 0 for its lower and 1 for its upper bound (Nichol
            and Dhariwal, arXiv 2102.09672, eq. 15), of x_t's shape; None when the network has not learned it.
    """

    x0: Tensor
    noise: Tensor
    variance_fraction: Tensor | None = None


# (x_t [B, ...], t [B], all equal) -> a Prediction, or the plain pair (x0, noise)
Predict = Callable[[Tensor, Tensor], tuple]
# number of the step -> standard normal noise of x's shape
DrawNoise = Callable[[int], Tensor]


# (predict, path, x at times[0], times, draw_noise, **options) -> x at times[-1]
Solver = Callable[..., Tensor]


def predict_at(predict: Predict, x: Tensor, t: Tensor) -> Prediction:
    """Prediction for a batch x at one time t (a tensor without dimensions)."""
    return Prediction(*predict(x, t.to(x).expand(len(x))))


def noise_ratio(path: Path, now: Tensor, then: Tensor) -> Tensor:
    """Ratio of noise levels sigma(then) / sigma(now), also where sigma(now) is infinite."""
    (a, b), (a_then, b_then) = path.coefficients(now), path.coefficients(then)
    return (b_then * a) / (a_then * b)


def steps(times: Tensor) -> zip:
    """Steps: (number, time, next time) of each."""
    return zip(range(len(times) - 1), times[:-1], times[1:], strict=True)


def positive(value: Tensor) -> bool:
    """Check whether a noise of this deviation must be drawn at all."""
    return bool(torch.any(value > 0))
