"""DDPM and DDIM: steps from one noise level to the next through the posterior given the estimate of x0.

Formulas in a, b and r = sigma' / sigma, where a prime marks the next, lower level. On a variance-preserving path
a^2 = alpha_bar, r^2 = (1 / alpha_bar' - 1) / (1 / alpha_bar - 1), and these are the published formulas; they hold on
every path x_t = a x0 + b noise, since x_t / a has one and the same forward process on all of them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from torchtitan.diffusion.paths import Path
from torchtitan.diffusion.solvers.contract import (
    DrawNoise,
    Predict,
    ScheduleConfig,
    SolverConfig,
    Trained,
    noise_ratio,
    positive,
    predict_at,
    steps,
)
from torchtitan.settings import setting


def ddim(predict: Predict, path: Path, x: Tensor, times: Tensor, draw_noise: DrawNoise, *, eta: float = 0.0) -> Tensor:
    """DDIM: deterministic with eta = 0, DDPM of the smaller variance with eta = 1; first order.

    x' = a' x0 + sqrt(b'^2 - s^2) noise + s z with s = eta b' sqrt(1 - r^2), 0 <= eta <= 1.

    Source: Song, Meng and Ermon, "Denoising diffusion implicit models", arXiv 2010.02502, eq. 12 and 16.
    """
    for step, now, then in steps(times):
        a, b = path.coefficients(then)
        renewed = eta**2 * (1.0 - noise_ratio(path, now, then).square())  # share of the noise's variance
        estimate = predict_at(predict, x, now)
        x = a * estimate.x0 + b * (1.0 - renewed).sqrt() * estimate.noise
        fresh = b * renewed.sqrt()
        if positive(fresh):
            x = x + fresh * draw_noise(step)
    return x


def ddpm(
    predict: Predict, path: Path, x: Tensor, times: Tensor, draw_noise: DrawNoise, *, variance: str = "small"
) -> Tensor:
    """DDPM's ancestral sampling, on any subsequence of the noise levels; the last step, to t = 0, adds no noise.

    x' = a' x0 + b' r noise + s z: the posterior's mean and a deviation s of

        small    b' sqrt(1 - r^2), the posterior's own, beta_tilde
        large    b sqrt(1 - r^2), the forward step's, beta = 1 - alpha_bar / alpha_bar'
        learned  log-linearly between the two, by the prediction's variance_fraction

    Source: Ho, Jain and Abbeel, arXiv 2006.11239, eq. 6, 7 and section 3.2; Nichol and Dhariwal, "Improved denoising
    diffusion probabilistic models", arXiv 2102.09672, eq. 15 and section 3.4 (subsequences).

    Raises:
        ValueError: the variance is "learned" and the predictions carry none.
    """
    for step, now, then in steps(times):
        (_, b), (a_then, b_then) = path.coefficients(now), path.coefficients(then)
        ratio = noise_ratio(path, now, then)
        estimate = predict_at(predict, x, now)
        x = a_then * estimate.x0 + b_then * ratio * estimate.noise
        if positive(b_then):
            widening = (b / b_then) ** _fraction(variance, estimate.variance_fraction)
            x = x + b_then * (1.0 - ratio.square()).sqrt() * widening * draw_noise(step)
    return x


def _fraction(variance: str, learned: Tensor | None) -> Tensor | float:
    if variance != "learned":
        return {"small": 0.0, "large": 1.0}[variance]
    if learned is None:
        raise ValueError("ddpm: variance = learned needs a network that has learned it (use small or large)")
    return learned


@dataclass(kw_only=True)
class DDIMConfig(SolverConfig):
    """Keys of `ddim`."""

    eta: float = setting(0.0, "DDIM's eta, share of fresh noise: 0 is deterministic, 1 is DDPM", ge=0, le=1)

    solve = staticmethod(ddim)


@dataclass(kw_only=True)
class DDPMConfig(SolverConfig):
    """Keys of `ddpm`."""

    variance: Literal["small", "large", "learned"] = setting(
        "small", "variance of a step: the posterior's, the forward process's, or the model's"
    )

    solve = staticmethod(ddpm)

    def problems(self, trained: Trained, schedule: ScheduleConfig) -> Iterator[tuple[str, str]]:
        if self.variance == "learned" and not trained.learned_variance:
            text = "the model has not learned the variance (use small or large, or train with model.learned_variance)"
            yield "variance", text
