"""Solvers: from noise to images, all behind one signature.

    solver(predict, path, x, times, draw_noise) -> x at the last time

predict(x, t [B]) estimates (x0, noise); x [B, C, H, W] is float32 at times[0]; times [N + 1] falls from 1 to 0;
draw_noise(step) gives fresh standard normal noise of x's shape to solvers that add some. State is float32.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from torchtitan.diffusion.guidance import Predict
from torchtitan.diffusion.paths import Path

DrawNoise = Callable[[int], Tensor]
Solver = Callable[[Predict, Path, Tensor, Tensor, DrawNoise], Tensor]


def uniform_times(num_steps: int, device: torch.device | str = "cpu") -> Tensor:
    """num_steps + 1 equally spaced times from 1 to 0, float32."""
    return torch.linspace(1.0, 0.0, num_steps + 1, device=device)


def euler(predict: Predict, path: Path, x: Tensor, times: Tensor, draw_noise: DrawNoise) -> Tensor:
    """Euler's method for the probability-flow equation dx/dt = a'(t) x0 + b'(t) noise; first order."""
    for now, then in zip(times[:-1], times[1:], strict=True):
        x = x + (then - now) * _flow(predict, path, x, now)
    return x


def heun(predict: Predict, path: Path, x: Tensor, times: Tensor, draw_noise: DrawNoise) -> Tensor:
    """Heun's method, two evaluations a step and second order; the last step is Euler's.

    Source: Karras et al., "Elucidating the design space of diffusion-based generative models", algorithm 1.
    """
    for now, then in zip(times[:-2], times[1:-1], strict=True):
        slope = _flow(predict, path, x, now)
        ahead = x + (then - now) * slope
        x = x + (then - now) * 0.5 * (slope + _flow(predict, path, ahead, then))
    return euler(predict, path, x, times[-2:], draw_noise)


def _flow(predict: Predict, path: Path, x: Tensor, t: Tensor) -> Tensor:
    x0, noise = predict(x, t.expand(len(x)))
    a_slope, b_slope = path.derivatives(t)
    return a_slope * x0 + b_slope * noise


SOLVERS: dict[str, Solver] = {
    "euler": euler,
    "heun": heun,
}
