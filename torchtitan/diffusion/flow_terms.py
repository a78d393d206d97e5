"""Terms of the training loss beside the squared error: direction of the velocity, and distance from another sample's velocity.

The velocity is noise - x0, whatever the network predicts; its estimate follows from the network's output and x_t.
"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from torchtitan.diffusion.predictions import target, to_x0_and_noise

# Length below which the direction of an estimate is not trained as such: a network starts with the output 0, which has none,
# and a gradient of 1 / length would fill Adam's second moments.
_SHORTEST = 0.1


def cosine_distance(found: Tensor, wanted: Tensor) -> Tensor:
    """Mean over pixels of 1 - cos over channels, of [B, C, H, W]: [B].

    Source: Yao et al., "Reconstruction vs. generation: taming optimization dilemma in latent diffusion models", arXiv
    2501.01423, section 4 (LightningDiT's velocity direction loss).
    """
    cosine = (F.normalize(found, dim=1, eps=_SHORTEST) * F.normalize(wanted, dim=1)).sum(1)  # [B, H, W]
    return 1.0 - cosine.flatten(1).mean(1)


def partners(values: Tensor) -> Tensor:
    """Values [B, ...] of the partner of each sample, B even: samples 2k and 2k + 1 of a microbatch are each other's."""
    return values.unflatten(0, (-1, 2)).flip(1).flatten(0, 1)


class FlowTerms:
    """Terms of an `[objective]` section, by its weights: cosine_weight, contrastive_weight."""

    def __init__(self, config: Any) -> None:
        self._cosine, self._contrastive = config.cosine_weight, config.contrastive_weight
        self._prediction, self._sigma_data = config.prediction, config.sigma_data

    def loss(
        self, output: Tensor, x_t: Tensor, a: Tensor, b: Tensor, velocity: Tensor, weight: Tensor, kept: Tensor
    ) -> Tensor:
        """Terms of each sample, [B]: a function of its own output, the partner's part having no gradient.

        cosine_weight x cosine distance - contrastive_weight x kept x mean over elements of (estimate - partner's velocity)^2,
        the latter with the weight of the squared error.

        Args:
            output: the prediction [B, C, H, W], with gradient, made from x_t with the path's coefficients a and b.
            velocity: noise - x0 of each sample, [B, C, H, W].
            weight: weight on the squared error of the prediction, [B].
            kept: 0 where the condition was dropped, else 1 / the share of conditions that are kept, [B].

        Source of the second: Stoica et al., "Contrastive flow matching", arXiv 2506.05350, eq. 5.
        """
        total = weight.new_zeros(len(weight))
        if self._cosine:
            found = output
            if self._prediction != "velocity":
                x0, noise = to_x0_and_noise(self._prediction, output, x_t, a, b, self._sigma_data)
                found = noise - x0
            total = total + self._cosine * cosine_distance(found, velocity)
        if self._contrastive:
            other = partners(velocity)
            if self._prediction != "velocity":  # output that would give the partner's velocity at this x_t
                other = target(self._prediction, *to_x0_and_noise("velocity", other, x_t, a, b), a, b, self._sigma_data)
            distance = (output - other).square().flatten(1).mean(1)
            total = total - self._contrastive * kept * weight * distance
        return total
