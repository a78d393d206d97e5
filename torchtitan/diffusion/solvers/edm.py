"""EDM's stochastic sampler: Heun's method in sigma for y = x / a."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from torchtitan.diffusion.paths import Path
from torchtitan.diffusion.solvers.contract import (
    DrawNoise,
    Predict,
    ScheduleConfig,
    SolverConfig,
    Trained,
    predict_at,
    steps,
)
from torchtitan.diffusion.solvers.schedules import FluxShiftScheduleConfig, UniformScheduleConfig
from torchtitan.settings import setting


def edm_heun(
    predict: Predict, path: Path, x: Tensor, times: Tensor, draw_noise: DrawNoise,
    *, churn: float = 0.0, churn_min: float = 0.05, churn_max: float = 50.0, churn_noise: float = 1.003,
) -> Tensor:
    """Heun's method for dy/dsigma = (y - x0) / sigma, with noise added before steps; second order without churn.

    On EDM's path y is x. On another path it is x / a, which needs a > 0. The last step, to sigma = 0, is Euler's.

    Args:
        churn: S_churn, the amount of noise added over all steps; 0 is deterministic.
        churn_min, churn_max: S_min and S_max, the noise levels sigma between which it is added.
        churn_noise: S_noise, deviation of the added noise. All defaults: the paper's for ImageNet (table 5).

    Raises:
        ValueError: a is 0 at the first time.

    Source: Karras et al., "Elucidating the design space of diffusion-based generative models", algorithm 2.
    """
    a_first, _ = path.coefficients(times[0])
    if a_first <= 0:
        raise ValueError("edm_heun: sigma is infinite at the first time (start from a finite one, as edm_times do)")
    gamma = min(churn / (len(times) - 1), math.sqrt(2.0) - 1.0)
    y = x / a_first
    for step, now, then in steps(times):
        sigma, sigma_then = _sigma(path, now), _sigma(path, then)
        if gamma > 0 and churn_min <= sigma <= churn_max:
            raised = sigma * (1.0 + gamma)
            y = y + (raised.square() - sigma.square()).sqrt() * churn_noise * draw_noise(step)
            sigma = raised
        slope = _slope(predict, path, y, sigma)
        if sigma_then > 0:
            ahead = y + (sigma_then - sigma) * slope
            slope = 0.5 * (slope + _slope(predict, path, ahead, sigma_then))
        y = y + (sigma_then - sigma) * slope
    return path.coefficients(times[-1])[0] * y


def _sigma(path: Path, t: Tensor) -> Tensor:
    a, b = path.coefficients(t)
    return b / a


def _slope(predict: Predict, path: Path, y: Tensor, sigma: Tensor) -> Tensor:
    t = sigma / (1.0 + sigma)
    a, _ = path.coefficients(t)
    return predict_at(predict, a * y, t).noise


@dataclass(kw_only=True)
class EDMHeunConfig(SolverConfig):
    """Keys of `edm_heun`."""

    churn: float = setting(0.0, "noise added over all steps, EDM's S_churn: 0 is deterministic", ge=0)
    churn_min: float = setting(0.05, "lowest sigma of churn, S_min", ge=0, applies={"churn": ">0"})
    churn_max: float = setting(50.0, "highest sigma of churn, S_max", ge=0, applies={"churn": ">0"})
    churn_noise: float = setting(1.003, "deviation of the noise of churn, S_noise", gt=0, applies={"churn": ">0"})

    solve = staticmethod(edm_heun)

    def problems(self, trained: Trained, schedule: ScheduleConfig) -> Iterator[tuple[str, str]]:
        if isinstance(schedule, (UniformScheduleConfig, FluxShiftScheduleConfig)) and trained.path.t_max >= 1.0:
            text = f"edm_heun needs a finite sigma to start from, and objective.path = {trained.path_name}"
            yield "name", f"{text} (use sampling.schedule.name = edm)"
        if self.churn > 0 and self.churn_min > self.churn_max:
            text = f"{self.churn_min:g} is above sampling.solver.churn_max = {self.churn_max:g} (make it smaller)"
            yield "churn_min", text
