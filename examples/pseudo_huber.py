"""An objective: flow matching by the pseudo-Huber loss, which grows as the distance, not as its square, where that is large.

    train.py digits --job.name huber --job.plugins examples/pseudo_huber.py --objective.name pseudo_huber --objective.delta 0.1
"""

from dataclasses import dataclass
from typing import Literal

import torch.nn.functional as F

from torchtitan.diffusion.objective import Draw, LossTerms, Microbatch, Network, Objective, ObjectiveConfig
from torchtitan.diffusion.objectives import OBJECTIVES
from torchtitan.diffusion.paths import per_image
from torchtitan.diffusion.predictions import target
from torchtitan.settings import setting


@dataclass(kw_only=True)
class PseudoHuberConfig(ObjectiveConfig):
    name: Literal["pseudo_huber"] = setting("pseudo_huber", "objective")
    delta: float = setting(0.1, "root mean squared error at which the loss turns from a parabola to a line", gt=0)


class PseudoHuber(Objective):
    Config = PseudoHuberConfig
    diagnostics = ("linear_share",)  # logged as means by timestep bin

    def loss(self, model: Network, batch: Microbatch, draw: Draw) -> LossTerms:
        """2 delta (sqrt(delta^2 + e) - delta) of each image's mean squared error e, which it equals where e is small."""
        a, b = (per_image(c, batch.images) for c in self.path.coefficients(draw.t))
        x_t = a * batch.images + b * draw.noise  # [B, C, H, W]
        images, time, c_skip, c_out = self.network_inputs(x_t, draw.t)
        output, _ = self.read_output(model(images, time, batch.condition), x_t, c_skip, c_out)
        wanted = target(self.prediction, batch.images, draw.noise, a, b, self.sigma_data)
        error = F.mse_loss(output, wanted, reduction="none").flatten(1).mean(1)  # [B]
        delta = self.config.delta
        loss = draw.importance * 2 * delta * ((delta**2 + error).sqrt() - delta)
        share = (error > delta**2).float()
        return LossTerms(loss, error.detach(), draw.t, loss.detach(), {"linear_share": share})


OBJECTIVES["pseudo_huber"] = PseudoHuber
