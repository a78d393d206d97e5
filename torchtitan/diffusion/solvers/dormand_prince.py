"""Adaptive solver of the probability-flow equation: Dormand and Prince's pair of orders 5 and 4."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from torchtitan.diffusion.paths import Path, per_image
from torchtitan.diffusion.solvers.contract import DrawNoise, Predict, Prediction, ScheduleConfig, SolverConfig, Trained
from torchtitan.settings import setting

# Butcher's tableau. Source: Dormand and Prince, "A family of embedded Runge-Kutta formulae", 1980, table 2.
_NODES = (1 / 5, 3 / 10, 4 / 5, 8 / 9, 1.0, 1.0)
_STAGES = (
    (1 / 5,),
    (3 / 40, 9 / 40),
    (44 / 45, -56 / 15, 32 / 9),
    (19372 / 6561, -25360 / 2187, 64448 / 6561, -212 / 729),
    (9017 / 3168, -355 / 33, 46732 / 5247, 49 / 176, -5103 / 18656),
    (35 / 384, 0.0, 500 / 1113, 125 / 192, -2187 / 6784, 11 / 84),  # the step itself
)
_ERROR = (71 / 57600, 0.0, -71 / 16695, 71 / 1920, -17253 / 339200, 22 / 525, -1 / 40)  # order 5 minus order 4
_SAFETY, _SHRINK, _GROW = 0.9, 0.2, 5.0  # of step sizes. Source: Hairer, Norsett and Wanner, "Solving ODEs I", II.4
_END = 1e-4  # time of the last step, Euler's: at 0 some preconditionings have no finite input
_SMALLEST = 1e-4  # step that is taken whatever its error: fields with jumps end too


def dopri5(
    predict: Predict, path: Path, x: Tensor, times: Tensor, draw_noise: DrawNoise, *, rtol: float = 1e-3, atol: float = 1e-3
) -> Tensor:
    """Solve dx/dt = a'(t) x0 + b'(t) noise with steps that each image chooses for itself.

    A step is taken if the root mean square over an image's elements of error / (atol + rtol |x|) is at most 1. Of the times,
    the first is where it begins, and the first step is tried at the second. A batch is evaluated until its last image has
    arrived, each image at its own time; six evaluations a step, one more at the beginning and one at the end.
    """
    t, following = (times[number].to(x.device, torch.float64).expand(len(x)) for number in (0, 1))
    h = t - following

    def slope(x: Tensor, t: Tensor) -> Tensor:
        estimate = Prediction(*predict(x, t.to(x)))
        a_slope, b_slope = (per_image(each, x) for each in path.derivatives(t))
        return a_slope * estimate.x0 + b_slope * estimate.noise

    first = slope(x, t)
    while (moving := t > _END).any():
        h = torch.where(moving, torch.minimum(h, t - _END), 0.0)
        size = per_image(h, x)
        slopes = [first]
        for node, weights in zip(_NODES, _STAGES, strict=True):
            moved = x - size * _weighted(slopes, weights)
            slopes.append(slope(moved, t - node * h))
        scale = atol + rtol * torch.maximum(x.abs(), moved.abs())
        ratio = (size * _weighted(slopes, _ERROR) / scale).flatten(1).square().mean(1).sqrt().to(t)
        taken = moving & ((ratio <= 1.0) | (h <= _SMALLEST))
        x, first = (torch.where(per_image(taken, x), new, old) for new, old in ((moved, x), (slopes[-1], first)))
        t = torch.where(taken, t - h, t)
        t = torch.where(t - _END < 1e-12, _END, t)
        factor = (_SAFETY * ratio.clamp_min(1e-10) ** -0.2).nan_to_num(_SHRINK).clamp(_SHRINK, _GROW)
        h = torch.where(moving, h * torch.where(taken, factor, factor.clamp_max(1.0)), h).clamp_min(_SMALLEST / 2)
    return x - _END * slope(x, t)


def _weighted(slopes: list[Tensor], weights: tuple[float, ...]) -> Tensor:
    pairs = [(slope, weight) for slope, weight in zip(slopes, weights, strict=True) if weight]
    return sum((weight * slope for slope, weight in pairs[1:]), pairs[0][1] * pairs[0][0])


@dataclass(kw_only=True)
class Dopri5Config(SolverConfig):
    """Keys of `dopri5`."""

    rtol: float = setting(1e-3, "error allowed in a step, relative to the values", ge=0, le=1)
    atol: float = setting(1e-3, "and absolute", gt=0, le=1)

    adaptive = True
    solve = staticmethod(dopri5)

    def problems(self, trained: Trained, schedule: ScheduleConfig) -> Iterator[tuple[str, str]]:
        if trained.path.discrete:
            yield "name", f"dopri5 needs every time, and objective.path = {trained.path_name} has indices only (use ddim)"
