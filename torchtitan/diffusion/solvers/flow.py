"""Solvers in t for flows: the probability-flow equation, and the stochastic one with the same marginals."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from torchtitan.diffusion.paths import Path
from torchtitan.diffusion.solvers.contract import (
    DrawNoise,
    Predict,
    Prediction,
    ScheduleConfig,
    SolverConfig,
    Trained,
    predict_at,
    steps,
)
from torchtitan.settings import setting


def euler(predict: Predict, path: Path, x: Tensor, times: Tensor, draw_noise: DrawNoise) -> Tensor:
    """Euler's method for the probability-flow equation dx/dt = a'(t) x0 + b'(t) noise; first order."""
    for _, now, then in steps(times):
        x = x + (then - now) * _velocity(path, predict_at(predict, x, now), now)
    return x


def heun(predict: Predict, path: Path, x: Tensor, times: Tensor, draw_noise: DrawNoise) -> Tensor:
    """Heun's method in t, two evaluations a step and second order; the last step is Euler's.

    Source: Karras et al., "Elucidating the design space of diffusion-based generative models", algorithm 1.
    """
    for _, now, then in steps(times[:-1]):
        slope = _velocity(path, predict_at(predict, x, now), now)
        ahead = x + (then - now) * slope
        x = x + (then - now) * 0.5 * (slope + _velocity(path, predict_at(predict, ahead, then), then))
    return euler(predict, path, x, times[-2:], draw_noise)


def euler_maruyama(
    predict: Predict, path: Path, x: Tensor, times: Tensor, draw_noise: DrawNoise,
    *, diffusion_scale: float = 1.0, last_step: str = "velocity",
) -> Tensor:
    """Euler-Maruyama for the reverse-time equation with the flow's marginals; weakly of first order.

    dx = (v - w_t s / 2) dt + sqrt(w_t) dW with dt < 0, the velocity v = a' x0 + b' noise and the score
    s = -noise / b. Any w_t >= 0 keeps the marginals; here it is b, times diffusion_scale (0 is `euler`). The last step
    adds no noise. With last_step = "velocity" it follows v alone, and on the rectified flow returns the estimate of x0;
    with "mean" it follows the whole drift.

    SiT's code has the drift v + sigma s and the noise sqrt(2 sigma) dW, in time from noise to data:
    diffusion_scale = 2, last_step = "mean".

    Source: Ma et al., "SiT", arXiv 2401.08740, eq. 4 (the equation) and section 3 (the choices of w_t).
    """

    def moved(x: Tensor, now: Tensor, then: Tensor) -> tuple[Tensor, Tensor]:
        """State after a step without noise, and w there."""
        _, b = path.coefficients(now)
        w = diffusion_scale * b
        estimate = predict_at(predict, x, now)
        return x + (then - now) * (_velocity(path, estimate, now) + 0.5 * w / b * estimate.noise), w

    for step, now, then in steps(times[:-1]):
        mean, w = moved(x, now, then)
        x = mean + (w * (now - then)).sqrt() * draw_noise(step)
    if last_step == "mean":
        return moved(x, times[-2], times[-1])[0]
    return euler(predict, path, x, times[-2:], draw_noise)


def _velocity(path: Path, estimate: Prediction, t: Tensor) -> Tensor:
    a_slope, b_slope = path.derivatives(t)
    return a_slope * estimate.x0 + b_slope * estimate.noise


@dataclass(kw_only=True)
class EulerConfig(SolverConfig):
    """`euler` has no keys."""

    solve = staticmethod(euler)


@dataclass(kw_only=True)
class HeunConfig(SolverConfig):
    """`heun` has no keys."""

    solve = staticmethod(heun)


@dataclass(kw_only=True)
class EulerMaruyamaConfig(SolverConfig):
    """Keys of `euler_maruyama`."""

    diffusion_scale: float = setting(1.0, "squared diffusion of the stochastic flow, as a multiple of t; 2: SiT's code", ge=0)
    last_step: Literal["velocity", "mean"] = setting(
        "velocity", "what the last step follows, without noise: the velocity alone, or the whole drift as in SiT's code"
    )

    solve = staticmethod(euler_maruyama)

    def problems(self, trained: Trained, schedule: ScheduleConfig) -> Iterator[tuple[str, str]]:
        if trained.path_name != "rectified_flow":
            text = f"euler_maruyama is for rectified_flow, and objective.path = {trained.path_name}"
            yield "name", f"{text} (use ddpm, or edm_heun with churn)"
