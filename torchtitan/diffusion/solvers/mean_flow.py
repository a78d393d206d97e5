"""Steps by the mean velocity of a network that was trained on two times."""

from dataclasses import dataclass

from torch import Tensor

from torchtitan.diffusion.paths import Path
from torchtitan.diffusion.solvers.contract import DrawNoise, Prediction, SolverConfig, TwoTimePredict, steps


def mean_flow(predict: TwoTimePredict, path: Path, x: Tensor, times: Tensor, draw_noise: DrawNoise) -> Tensor:
    """Steps x - (t - r) u(x, r, t) from each time t to the next one r; exact for the exact mean velocity, in one step too.

    Source: Geng et al., "Mean flows for one-step generative modeling", arXiv 2505.13447, eq. 12.
    """
    for _, now, then in steps(times):
        t, duration = (time.to(x).expand(len(x)) for time in (now, now - then))
        estimate = Prediction(*predict(x, t, duration))
        x = x + (then - now) * (estimate.noise - estimate.x0)
    return x


@dataclass(kw_only=True)
class MeanFlowSolverConfig(SolverConfig):
    """`mean_flow` has no keys."""

    solve = staticmethod(mean_flow)
    two_times = True
