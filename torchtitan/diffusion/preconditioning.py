"""What the network is given and how its output is scaled: F(c_in x_t, c_noise) -> c_skip x_t + c_out F.

Source: Karras et al., "Elucidating the design space of diffusion-based generative models", eq. 7.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Scaling:
    """The four coefficients at given noise levels, each [B]."""

    c_in: Tensor
    c_skip: Tensor
    c_out: Tensor
    c_noise: Tensor


class Preconditioning(Protocol):
    """A rule for the four coefficients."""

    def scaling(self, t: Tensor) -> Scaling:
        """The coefficients at times t [B] in [0, 1]."""


class Identity:
    """The network sees x_t as it is and the time as 1000 t, the range that DiT's sinusoids were made for."""

    def scaling(self, t: Tensor) -> Scaling:
        return Scaling(torch.ones_like(t), torch.zeros_like(t), torch.ones_like(t), 1000.0 * t)


PRECONDITIONINGS: dict[str, type[Preconditioning]] = {
    "identity": Identity,
}
