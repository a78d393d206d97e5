"""What a network is asked for and given: prediction types of its output, and preconditioning of inputs and output.

Every prediction type is a linear target y = p x0 + q noise. With x_t = a x0 + b noise and D = a q - b p,

    x0 = (q x_t - b y) / D,    noise = (a y - p x_t) / D.

D is 1 for the velocity of the rectified flow and for v on a variance-preserving path, -b for x0, a for noise.
p and q are functions of (a, b, sigma_data), so one table serves every path.

Preconditioning makes the prediction of a network F: F(c_in x_t, c_noise) -> c_skip x_t + c_out F. Source: Karras et al.,
"Elucidating the design space of diffusion-based generative models", eq. 7.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from torchtitan.diffusion.paths import IndexedPath, Path, indexed


def _edm_network_output(a: Tensor, b: Tensor, sigma_data: float) -> tuple[Tensor, Tensor]:
    """EDM's network output F, (sigma x0 / sigma_data - sigma_data noise) / sqrt(sigma^2 + sigma_data^2).

    Its variance is 1 at every sigma for data of deviation sigma_data; at sigma_data = 1 it is -v of the
    variance-preserving path. Source: Karras et al., arXiv 2206.00364, eq. 8, solved for F.
    """
    norm = torch.sqrt(b**2 + (sigma_data * a) ** 2)
    return b / (sigma_data * norm), -sigma_data * a / norm


# name -> (p, q) as functions of (a, b, sigma_data)
PREDICTIONS: dict[str, Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]]] = {
    "x0": lambda a, b, _: (torch.ones_like(a), torch.zeros_like(a)),
    "noise": lambda a, b, _: (torch.zeros_like(a), torch.ones_like(a)),
    # Salimans and Ho, "Progressive distillation", arXiv 2202.00512, appendix D.
    "v": lambda a, b, _: (-b, a),
    # Velocity of the rectified flow, noise - x0.
    "velocity": lambda a, b, _: (-torch.ones_like(a), torch.ones_like(a)),
    "edm": _edm_network_output,
}

# Targets without coefficients: the same numbers as those of the table, without products with 1, 0 and -1.
_PLAIN_TARGETS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "x0": lambda x0, noise: x0,
    "noise": lambda x0, noise: noise,
    "velocity": lambda x0, noise: noise - x0,
}


def target(prediction: str, x0: Tensor, noise: Tensor, a: Tensor, b: Tensor, sigma_data: float = 0.5) -> Tensor:
    """Target: the tensor that a network of this prediction type is trained to output.

    Args:
        prediction: a key of PREDICTIONS.
        x0, noise: clean images and the added noise, [B, ...].
        a, b: the path's coefficients, broadcastable to x0.
        sigma_data: deviation of the data that the prediction edm is made for.

    Returns:
        y = p x0 + q noise, of x0's shape; of the predictions x0 and noise the given tensor itself.
    """
    if plain := _PLAIN_TARGETS.get(prediction):
        return plain(x0, noise)
    p, q = PREDICTIONS[prediction](a, b, sigma_data)
    return p * x0 + q * noise


def to_x0_and_noise(
    prediction: str, output: Tensor, x_t: Tensor, a: Tensor, b: Tensor, sigma_data: float = 0.5
) -> tuple[Tensor, Tensor]:
    """Convert a network's output to estimates of the clean image and of the noise.

    Args:
        output: the network's output y, [B, ...].
        x_t: the noisy images it was given, of output's shape.
        a, b: the path's coefficients, broadcastable to output; D = a q - b p must not be 0 (x0-prediction at
            b = 0 and noise-prediction at a = 0 do not determine the other one).
        sigma_data: deviation of the data that the prediction edm is made for.

    Returns:
        x0 and noise, of output's shape, with a x0 + b noise = x_t.
    """
    p, q = PREDICTIONS[prediction](a, b, sigma_data)
    determinant = a * q - b * p
    return (q * x_t - b * output) / determinant, (a * output - p * x_t) / determinant


def noise_error_weight(prediction: str, sigma: Tensor, a: Tensor, sigma_data: float = 0.5) -> Tensor:
    """Weight w with (squared error of y) = w x (squared error of the noise), for one and the same x_t.

    An error e in the noise is an error -(b/a) e in x0, hence (q - p sigma) e in y.

    Args:
        sigma: b / a, positive.
        a: the path's coefficient of x0 at that sigma, of sigma's shape.
        sigma_data: deviation of the data that the prediction edm is made for.
    """
    return noise_error_factor(prediction, sigma, a, sigma_data) ** 2


def noise_error_factor(prediction: str, sigma: Tensor, a: Tensor, sigma_data: float = 0.5) -> Tensor:
    """Factor q - p sigma with (error of y) = factor x (error of the noise): its square is `noise_error_weight`."""
    p, q = PREDICTIONS[prediction](a, a * sigma, sigma_data)
    return q - p * sigma


_SMALLEST_LOGIT_ARGUMENT = 2.0**-24


@dataclass(frozen=True)
class Scaling:
    """Coefficients at given noise levels, each [B]."""

    c_in: Tensor
    c_skip: Tensor
    c_out: Tensor
    c_noise: Tensor


class Preconditioning(Protocol):
    """Rule for the four coefficients; scales: False where c_in = 1, c_skip = 0 and c_out = 1 at every time."""

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
    """Index: inputs x_t and the DDPM's index, whole on a discrete path. Source: Peebles and Xie, arXiv 2212.09748."""

    scales: ClassVar[bool] = False

    path: IndexedPath

    def time(self, t: Tensor) -> Tensor:
        return self.path.t_to_index(t).to(t.dtype)

    def scaling(self, t: Tensor) -> Scaling:
        return _plain(self.time(t))


class DataTime:
    """Data time: the inputs are x_t and 1 - t, 0 for noise and 1 for data.

    Source: Li and He, "Back to basics: let denoising generative models denoise", arXiv 2511.13720; its code embeds such times.
    """

    scales: ClassVar[bool] = False

    def time(self, t: Tensor) -> Tensor:
        return 1.0 - t

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
    "data_time": lambda path, prediction, sigma_data: DataTime(),
    "sit": lambda path, prediction, sigma_data: ReversedTime(),
    "edm": EDMScaling,
}
