"""Paths from data to noise: x_t = a(t) x0 + b(t) noise, with t = sigma / (1 + sigma) and sigma = b / a.

t = 0 is clean data, t = 1 is noise, and ln sigma = logit t on every path. Paths differ in the scale of x_t, the start
of sampling, and the DDPM's integer indices.
"""

import math
from collections.abc import Callable
from typing import Protocol, TypeGuard

import torch
from torch import Tensor

from torchtitan.device_tables import DeviceTables

# One below the next float32: b of the EDM path, which has no end, stays finite at t = 1.
_LAST_BEFORE_ONE = 1.0 - 2.0**-24
# Source: Ho, Jain and Abbeel, "Denoising diffusion probabilistic models", arXiv 2006.11239, section 4.
NUM_INDICES = 1000


class Path(Protocol):
    """Path: its two coefficients and their derivatives, as functions of t in [0, 1].

    Attributes:
        t_max: start of sampling, the largest time.
        num_indices: T of a path whose times have indices, as a DDPM's 0 .. T - 1; 0 for one without.
        discrete: whether only the times of integer indices are trained.
    """

    t_max: float
    num_indices: int
    discrete: bool

    def coefficients(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """Coefficients a(t) and b(t), each of t's shape."""

    def derivatives(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """Derivatives da/dt and db/dt, each of t's shape."""

    def t_to_sigma(self, t: Tensor) -> Tensor:
        """Convert times t < 1 to sigma = b / a."""

    def sigma_to_t(self, sigma: Tensor) -> Tensor:
        """Convert sigma >= 0 to the time with b / a = sigma."""


class IndexedPath(Path, Protocol):
    """Path with indices: integers on a discrete one, real numbers in [0, T - 1] on a continuous one."""

    betas: Tensor
    alphas_cumprod: Tensor
    posterior_x0: Tensor
    posterior_x_t: Tensor
    posterior_variance: Tensor
    reverse_step: DeviceTables

    def index_to_log_sigma(self, index: Tensor) -> Tensor:
        """Convert an index to ln sigma, float64."""

    def log_sigma_to_index(self, log_sigma: Tensor) -> Tensor:
        """Convert ln sigma to a real index, float64."""

    def index_to_t(self, index: Tensor) -> Tensor:
        """Convert an index to the common time, float64."""

    def t_to_index(self, t: Tensor) -> Tensor:
        """Convert times to indices: int64 on a discrete path, else float64."""


def has_indices(path: Path) -> TypeGuard[IndexedPath]:
    """Check whether the times of a path have indices."""
    return path.num_indices > 0


def indexed(path: Path) -> IndexedPath:
    """Require a path with indices. Raises ValueError: it has none."""
    if not has_indices(path):
        raise ValueError(f"{type(path).__name__} has no indices")
    return path


class _CommonTime:
    """Common time of all paths, without indices."""

    num_indices = 0
    discrete = False

    def t_to_sigma(self, t: Tensor) -> Tensor:
        return t / (1.0 - t)

    def sigma_to_t(self, sigma: Tensor) -> Tensor:
        return sigma / (1.0 + sigma)


class RectifiedFlow(_CommonTime):
    """Flow x_t = (1 - t) x0 + t noise. Source: Liu, Gong and Liu, "Flow straight and fast", arXiv 2209.03003, eq. 1.
    """

    t_max = 1.0

    def coefficients(self, t: Tensor) -> tuple[Tensor, Tensor]:
        return 1.0 - t, t

    def derivatives(self, t: Tensor) -> tuple[Tensor, Tensor]:
        return -torch.ones_like(t), torch.ones_like(t)


class EDM(_CommonTime):
    """EDM: x_t = x0 + sigma noise, sampled from sigma = 80 on. Source: Karras et al., arXiv 2206.00364, Table 1."""

    t_max = 80.0 / 81.0

    def coefficients(self, t: Tensor) -> tuple[Tensor, Tensor]:
        return torch.ones_like(t), self.t_to_sigma(t.clamp(max=_LAST_BEFORE_ONE))

    def derivatives(self, t: Tensor) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(t), (1.0 - t.clamp(max=_LAST_BEFORE_ONE)) ** -2


class DDPM(_CommonTime):
    """DDPM's path x_t = sqrt(alpha_bar) x0 + sqrt(1 - alpha_bar) noise, with alpha_bar given at T integer indices.

    As functions of the common time, the coefficients are those of every variance-preserving path. Between two
    integers ln sigma is linear in the index, so a continuous path agrees with the discrete one at the integers.

    Attributes:
        discrete: whether indices are integers 0 .. T - 1, or any real number in [0, T - 1].
        betas, alphas_cumprod: float64 [T].
        posterior_x0, posterior_x_t: coefficients of the mean of q(x_(k-1) | x_k, x0), float64 [T].
        posterior_variance: its variance, float64 [T]; 0 at index 0.
        reverse_step: posterior_x0, posterior_x_t, and the ln of the posterior's variance and of beta, float32 [T, 4]; the
            variance of index 1 at index 0.

    Source: Ho, Jain and Abbeel, arXiv 2006.11239, eq. 4 and 7.
    """

    def __init__(self, betas: Tensor, continuous: bool = False) -> None:
        self.num_indices = len(betas)
        self.discrete = not continuous
        self.betas = betas
        self.alphas_cumprod = torch.cumprod(1.0 - betas, 0)
        before = torch.cat((torch.ones(1, dtype=betas.dtype), self.alphas_cumprod[:-1]))
        self.posterior_x0 = before.sqrt() * betas / (1.0 - self.alphas_cumprod)
        self.posterior_x_t = (1.0 - betas).sqrt() * (1.0 - before) / (1.0 - self.alphas_cumprod)
        self.posterior_variance = betas * (1.0 - before) / (1.0 - self.alphas_cumprod)
        variance = torch.cat((self.posterior_variance[1:2], self.posterior_variance[1:]))
        columns = (self.posterior_x0, self.posterior_x_t, variance.log(), betas.log())
        self.reverse_step = DeviceTables(torch.stack(columns, dim=1).to(torch.float32))
        log_sigmas = 0.5 * (torch.log1p(-self.alphas_cumprod) - torch.log(self.alphas_cumprod))
        self._log_sigmas = DeviceTables(log_sigmas)
        self.t_max = torch.sigmoid(log_sigmas[-1]).item()

    def coefficients(self, t: Tensor) -> tuple[Tensor, Tensor]:
        norm = torch.sqrt((1.0 - t) ** 2 + t**2)
        return (1.0 - t) / norm, t / norm

    def derivatives(self, t: Tensor) -> tuple[Tensor, Tensor]:
        norm = torch.sqrt((1.0 - t) ** 2 + t**2)
        return -t / norm**3, (1.0 - t) / norm**3

    def index_to_log_sigma(self, index: Tensor) -> Tensor:
        """Convert integer or real indices to ln sigma, float64; beyond both ends the last interval is continued."""
        (table,), index = self._log_sigmas.on(index.device), index.to(torch.float64)
        below = index.floor().clamp(0, self.num_indices - 2).long()
        return torch.lerp(table[below], table[below + 1], index - below)

    def log_sigma_to_index(self, log_sigma: Tensor) -> Tensor:
        """Invert index_to_log_sigma: a real index, float64."""
        (table,), log_sigma = self._log_sigmas.on(log_sigma.device), log_sigma.to(torch.float64)
        below = (torch.searchsorted(table, log_sigma, right=True) - 1).clamp(0, self.num_indices - 2)
        return below + (log_sigma - table[below]) / (table[below + 1] - table[below])

    def index_to_t(self, index: Tensor) -> Tensor:
        """Convert integer or real indices to the common time, float64."""
        return torch.sigmoid(self.index_to_log_sigma(index))

    def t_to_index(self, t: Tensor) -> Tensor:
        """Convert times to indices: int64, the nearest, on a discrete path; float64 in [0, T - 1] on a continuous one.

        The time of an integer index, rounded to float32, gives that integer back.
        """
        index = self.log_sigma_to_index(torch.logit(t.to(torch.float64))).clamp(0, self.num_indices - 1)
        return index.round().long() if self.discrete else index


def linear_betas() -> Tensor:
    """Betas from 1e-4 to 0.02, linear, float64 [T]. Source: Ho, Jain and Abbeel, arXiv 2006.11239, section 4."""
    return torch.linspace(1e-4, 0.02, NUM_INDICES, dtype=torch.float64)


def cosine_betas() -> Tensor:
    """Betas of at most 0.999 with alpha_bar a squared cosine, float64 [T].

    Source: Nichol and Dhariwal, "Improved denoising diffusion probabilistic models", arXiv 2102.09672, eq. 17.
    """
    fraction = torch.arange(NUM_INDICES + 1, dtype=torch.float64) / NUM_INDICES
    alphas_cumprod = torch.cos((fraction + 0.008) / 1.008 * math.pi / 2) ** 2
    return (1.0 - alphas_cumprod[1:] / alphas_cumprod[:-1]).clamp(max=0.999)


PATHS: dict[str, Callable[[], Path]] = {
    "rectified_flow": RectifiedFlow,
    "edm": EDM,
    "ddpm_linear": lambda: DDPM(linear_betas()),
    "ddpm_linear_continuous": lambda: DDPM(linear_betas(), continuous=True),
    "ddpm_cosine": lambda: DDPM(cosine_betas()),
    "ddpm_cosine_continuous": lambda: DDPM(cosine_betas(), continuous=True),
}


def per_image(values: Tensor, images: Tensor) -> Tensor:
    """View one value per image [B], or per token of a grid [B, 1, h, w], so that it broadcasts over images [B, ..., H, W]."""
    if values.ndim == 4:
        (height, width), (rows, columns) = images.shape[2:], values.shape[2:]
        return values.repeat_interleave(height // rows, 2).repeat_interleave(width // columns, 3)
    return values.reshape(-1, *([1] * (images.ndim - 1)))
