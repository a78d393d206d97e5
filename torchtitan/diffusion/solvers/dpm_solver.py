"""DPM-Solver++: exponential integrators of the probability flow in the log signal-to-noise ratio."""

from dataclasses import dataclass

from torch import Tensor

from torchtitan.diffusion.paths import Path
from torchtitan.diffusion.solvers.contract import DrawNoise, Predict, SolverConfig, noise_ratio, predict_at, steps


def dpmpp_2m(predict: Predict, path: Path, x: Tensor, times: Tensor, draw_noise: DrawNoise) -> Tensor:
    """DPM-Solver++(2M): one evaluation a step, second order by reusing the last one.

    x' = (b' / b) x + a' (1 - e^-h) D, h = ln(sigma / sigma') and D = (1 + w) x0 - w x0_before, w = h / (2 h_before).
    The first step, and one from or to an infinite log ratio (a = 0 at t = 1, b = 0 at t = 0), is of first order, which
    is DDIM's; deterministic.

    Source: Lu et al., "DPM-Solver++", arXiv 2211.01095, algorithm 2.
    """
    before: tuple[Tensor, Tensor] | None = None  # x0 and h of the last step
    for _, now, then in steps(times):
        (a, b), (a_then, b_then) = path.coefficients(now), path.coefficients(then)
        h = -noise_ratio(path, now, then).log()
        x0 = predict_at(predict, x, now).x0
        direction = x0
        if before is not None and h.isfinite():
            x0_before, h_before = before
            w = h / (2.0 * h_before)  # 0 after a step from t = 1
            direction = (1.0 + w) * x0 - w * x0_before
        keep = b_then / b
        x = keep * x + (a_then - a * keep) * direction
        before = x0, h
    return x


@dataclass(kw_only=True)
class DPMPP2MConfig(SolverConfig):
    """`dpmpp_2m` has no keys."""

    solve = staticmethod(dpmpp_2m)
