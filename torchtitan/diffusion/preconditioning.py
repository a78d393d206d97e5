"""Preconditioning of the network's inputs and output: F(c_in x_t, c_noise) -> c_skip x_t + c_out F.

Source: Karras et al., "Elucidating the design space of diffusion-based generative models", eq. 7.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from torchtitan.diffusion.paths import IndexedPath, Path, indexed

_SMALLEST_LOGIT_ARGUMENT = 2.0**-24


@dataclass(frozen=True)
class Scaling:
    """Coefficients at given noise levels, each [B]."""

    c_in: Tensor
    c_skip: Tensor
    c_out: Tensor
    c_noise: Tensor


class Preconditioning(Protocol):
    """Rule for the four coefficients.

    Attributes:
        scales: whether images or output are scaled: False where c_in = 1, c_skip = 0 and c_out = 1 at every time.
    """

    scales: ClassVar[bool]

    def time(self, t: Tensor) -> Tensor:
        """The network's time c_noise at times t [B] in [0, 1]."""

    def scaling(self, t: Tensor) -> Scaling:
        """Coefficients at times t [B] in [0, 1]."""


class Identity:
    """Identity: the network's inputs are x_t and 1000 t, the range of DiT's sinusoids."""

    scales: ClassVar[bool] = False

    def time(self, t: Tensor) -> Tensor:
        return 1000.0 * t

    def scaling(self, t: Tensor) -> Scaling:
        return _plain(self.time(t))


@dataclass(frozen=True)
class Index:
    """Index: the network's inputs are x_t and the DDPM's index, a whole number on a discrete path.

    Source: Peebles and Xie, "Scalable diffusion models with transformers", arXiv 2212.09748.
    """

    scales: ClassVar[bool] = False

    path: IndexedPath

    def time(self, t: Tensor) -> Tensor:
        return self.path.t_to_index(t).to(t.dtype)

    def scaling(self, t: Tensor) -> Scaling:
        return _plain(self.time(t))


class ReversedTime:
    """Reversed time: the input is 1 - t and the output the velocity towards data, x0 - noise, as in published SiT.

    Source: Ma et al., "SiT: exploring flow and diffusion-based generative models with scalable interpolant
    transformers", arXiv 2401.08740; its code counts time from noise (0) to data (1).
    """

    scales: ClassVar[bool] = True

    def time(self, t: Tensor) -> Tensor:
        return 1.0 - t

    def scaling(self, t: Tensor) -> Scaling:
        return Scaling(torch.ones_like(t), torch.zeros_like(t), -torch.ones_like(t), self.time(t))


@dataclass(frozen=True)
class EDMScaling:
    """EDM: input and target of unit variance at every noise level, and the time as ln(sigma) / 4.

    Written for x_t = a x0 + b noise of any path, that is for a times the x0 + sigma noise of the paper. The network's
    output is F: as the prediction edm it is the prediction, and for x0 the estimate is c_skip x_t + c_out F.

    Source: Karras et al., arXiv 2206.00364, Table 1.
    """

    scales: ClassVar[bool] = True

    path: Path
    prediction: str
    sigma_data: float

    def time(self, t: Tensor) -> Tensor:
        return 0.25 * torch.logit(t, eps=_SMALLEST_LOGIT_ARGUMENT)

    def scaling(self, t: Tensor) -> Scaling:
        a, b = self.path.coefficients(t)
        norm = torch.sqrt(b**2 + (self.sigma_data * a) ** 2)
        c_noise = self.time(t)
        if self.prediction == "edm":
            return Scaling(1.0 / norm, torch.zeros_like(t), torch.ones_like(t), c_noise)
        return Scaling(1.0 / norm, self.sigma_data**2 * a / norm**2, self.sigma_data * b / norm, c_noise)


def _plain(time: Tensor) -> Scaling:
    return Scaling(torch.ones_like(time), torch.zeros_like(time), torch.ones_like(time), time)


# name -> preconditioning for (path, prediction, sigma_data)
PRECONDITIONINGS: dict[str, Callable[[Path, str, float], Preconditioning]] = {
    "identity": lambda path, prediction, sigma_data: Identity(),
    "index": lambda path, prediction, sigma_data: Index(indexed(path)),
    "sit": lambda path, prediction, sigma_data: ReversedTime(),
    "edm": EDMScaling,
}
