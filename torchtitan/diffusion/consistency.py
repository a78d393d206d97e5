"""Consistency training: the estimate of x0 at a time equals that at a smaller time, on the same line of noise.

    loss = importance x d(f(x_t, t), stop_gradient f(x_s, s)) / (1 - s / t),   s = step_ratio x t,

with f the estimate of x0, which is x_t itself at t = 0, and d the pseudo-Huber distance of the root mean square difference,

    d(x, y) = sqrt(|x - y|^2 / D + c^2) - c,   c = HUBER_C, of D elements.

The source sums over the elements, with c = 0.00054 sqrt(D), 0.03 for CIFAR-10: its distance is sqrt(D) times this one with
c = 0.00054 at any size. One evaluation of f then draws a sample. Source: Song and Dhariwal, "Improved techniques for training
consistency models", arXiv 2310.14189, eqs. 5 and 8; the constant ratio of times as in Geng et al., "Consistency models made
easy", arXiv 2406.14548.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from torchtitan.diffusion.objective import Draw, LossTerms, Microbatch, Network, Objective, ObjectiveConfig
from torchtitan.diffusion.paths import PATHS, per_image
from torchtitan.settings import setting

# Root mean square difference at which the distance turns from quadratic to linear.
HUBER_C = 0.00054


@dataclass(kw_only=True)
class ConsistencyConfig(ObjectiveConfig):
    """`[objective]` with name = "consistency"."""

    name: str = setting("consistency", "objective")
    step_ratio: float = setting(0.9, "smaller of the two times that are compared, over the larger", gt=0, lt=1)


class Consistency(Objective):
    """Consistency objective: a network with the same estimate of x0 at all times of a trajectory."""

    Config: ClassVar[type[ObjectiveConfig]] = ConsistencyConfig
    untrained_forwards = 1
    loss_at_zero = False

    def loss(self, model: Network, batch: Microbatch, draw: Draw) -> LossTerms:
        x0, condition = batch.images, batch.condition
        earlier = self.config.step_ratio * draw.t
        with torch.no_grad():  # the same weights, held still
            wanted, _ = self.predict(model, self._noisy(x0, draw.noise, earlier), earlier, condition)
        found, _ = self.predict(model, self._noisy(x0, draw.noise, draw.t), draw.t, condition)
        error = (found - wanted).square().flatten(1).mean(1)  # [B]
        distance = (error + HUBER_C**2).sqrt() - HUBER_C
        loss = draw.importance * distance / (1.0 - self.config.step_ratio)
        return LossTerms(loss, error.detach(), draw.t, loss.detach())

    def _noisy(self, x0: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        a, b = self.path.coefficients(per_image(t, x0))
        return a * x0 + b * noise

    @classmethod
    def problems(cls, config: ConsistencyConfig) -> Iterator[tuple[str, str]]:
        """Refuse paths in steps, and predictions whose estimate at t = 0 is not the image itself."""
        if PATHS[config.path]().discrete:
            text = f"{config.path} has no time between its indices (use rectified_flow, edm or a continuous path)"
            yield "objective.path", text
        if config.prediction == "x0" and config.preconditioning != "edm":
            yield "objective.prediction", "x0 is not the image itself at t = 0 (use velocity, v or edm)"
