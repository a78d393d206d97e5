"""Learned loss weighting: the expected loss at each noise level, trained together with the network.

Source: Karras et al., "Analyzing and improving the training dynamics of diffusion models", arXiv 2312.02696, eq. 21
and appendix B; after Kendall, Gal and Cipolla, "Multi-task learning using uncertainty", arXiv 1705.07115.
"""

import math

import torch
from torch import Tensor, nn

from torchtitan import philox


class LogUncertainty(nn.Module):
    """Log uncertainty u(ln sigma), one or several functions: a linear map of fixed random waves in ln(sigma) / 4.

    A loss L >= 0 is replaced by L / e^u + u, with the least expected value over u at u = ln E[L]: every noise level
    then has the mean loss 1 + u, and its gradient the weight 1 / E[L]. u begins at 0, where the loss is L itself.

    Attributes:
        weight: of the waves, float32 [K, F]; the only parameter.
    """

    frequency: Tensor
    phase: Tensor

    def __init__(self, functions: int, features: int, log_sigma_range: tuple[float, float]) -> None:
        """
        Args:
            features: number of waves F, the same ones in every run.
            log_sigma_range: of the trained levels. Beyond it, where the waves are arbitrary, u stays as at the end.
        """
        super().__init__()
        self.log_sigma_range = log_sigma_range
        self.weight = nn.Parameter(torch.zeros(functions, features))
        numbers = torch.arange(features)
        frequency = philox.normal(0, "waves", numbers, (1,))[:, 0]
        phase = philox.uniform(0, "waves", numbers + features).to(torch.float32)
        self.register_buffer("frequency", frequency, persistent=False)
        self.register_buffer("phase", phase, persistent=False)

    def forward(self, log_sigma: Tensor) -> Tensor:
        """Evaluate u at ln sigma [N], of any device; float32 [K, N]."""
        weight, frequency, phase = (value.to(log_sigma.device) for value in (self.weight, self.frequency, self.phase))
        level = 0.25 * log_sigma.clamp(*self.log_sigma_range).to(torch.float32)
        angle = 2.0 * math.pi * (frequency * level[:, None] + phase)  # [N, F]
        # Of unit norm, so that one step of Adam moves u by at most some sqrt(F) learning rates.
        waves = torch.cos(angle) * math.sqrt(2.0 / len(frequency))
        # No matrix product: autocast would have it in bfloat16.
        return (weight[:, None, :] * waves).sum(-1)
