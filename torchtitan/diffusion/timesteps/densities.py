"""Densities of the training timestep t on (0, 1), each with its keys in `[objective.timesteps]`."""

from dataclasses import dataclass

import torch
from torch import Tensor

from torchtitan.diffusion.paths import IndexedPath, Path, has_indices
from torchtitan.diffusion.timesteps.contract import SmoothDensity
from torchtitan.diffusion.timesteps.sampler import TimestepsConfig
from torchtitan.settings import setting


@dataclass(frozen=True)
class Uniform:
    """t ~ U(0, 1), which is ln sigma ~ Logistic(0, 1)."""

    def quantile(self, u: Tensor) -> Tensor:
        return u

    def distribution(self, log_sigma: Tensor) -> Tensor:
        return torch.sigmoid(log_sigma)

    def log_sigma_density(self, log_sigma: Tensor) -> Tensor:
        return torch.sigmoid(log_sigma) * torch.sigmoid(-log_sigma)


@dataclass(kw_only=True)
class UniformConfig(TimestepsConfig):
    """Uniform over t, on a DDPM path over its indices."""

    def density(self, path: Path) -> SmoothDensity:
        return uniform_density(path)


@dataclass(frozen=True)
class LogitNormal:
    """logit t = ln sigma ~ N(mean, std^2). Source: Esser et al., arXiv 2403.03206, eq. 19.

    The same density as EDM's ln sigma ~ N(P_mean, P_std^2) with mean = P_mean and std = P_std.
    """

    mean: float = 0.0
    std: float = 1.0

    def quantile(self, u: Tensor) -> Tensor:
        return torch.sigmoid(self.mean + self.std * torch.special.ndtri(u))

    def distribution(self, log_sigma: Tensor) -> Tensor:
        return torch.special.ndtr((log_sigma - self.mean) / self.std)

    def log_sigma_density(self, log_sigma: Tensor) -> Tensor:
        z = (log_sigma - self.mean) / self.std
        return torch.exp(-0.5 * z**2) / (self.std * (2.0 * torch.pi) ** 0.5)


@dataclass(kw_only=True)
class LogitNormalConfig(TimestepsConfig):
    """Normal in logit(t)."""

    mean: float = setting(0.0, "mean of logit(t)")
    std: float = setting(1.0, "standard deviation of logit(t)", gt=0)

    light_tailed = True

    def density(self, path: Path) -> SmoothDensity:
        return LogitNormal(self.mean, self.std)


@dataclass(kw_only=True)
class LognormalSigmaConfig(TimestepsConfig):
    """Normal in ln(sigma): the same densities, with EDM's names and defaults."""

    p_mean: float = setting(-1.2, "mean of ln(sigma)")
    p_std: float = setting(1.2, "standard deviation of ln(sigma)", gt=0)

    light_tailed = True

    def density(self, path: Path) -> SmoothDensity:
        return LogitNormal(self.p_mean, self.p_std)


@dataclass(frozen=True)
class Mode:
    """t = 1 - u - scale (cos^2(pi u / 2) - 1 + u) of uniform u: heavy in the middle for a positive scale.

    -1 < scale < 2 / (pi - 2) = 1.7519. Source: Esser et al., arXiv 2403.03206, eq. 20. With 1 - u instead of u, so that
    t rises with u: t = u + scale (u - sin^2(pi u / 2)).
    """

    scale: float

    def quantile(self, u: Tensor) -> Tensor:
        return u + self.scale * (u - torch.sin(0.5 * torch.pi * u) ** 2)

    def distribution(self, log_sigma: Tensor) -> Tensor:
        t = torch.sigmoid(log_sigma)
        low, high = torch.zeros_like(t), torch.ones_like(t)
        for _ in range(60):  # halves an interval of 1 to below float64's resolution
            middle = 0.5 * (low + high)
            above = self.quantile(middle) > t
            low, high = torch.where(above, low, middle), torch.where(above, middle, high)
        return 0.5 * (low + high)

    def log_sigma_density(self, log_sigma: Tensor) -> Tensor:
        u = self.distribution(log_sigma)
        slope = 1.0 + self.scale * (1.0 - 0.5 * torch.pi * torch.sin(torch.pi * u))  # dt/du
        return torch.sigmoid(log_sigma) * torch.sigmoid(-log_sigma) / slope


@dataclass(kw_only=True)
class ModeConfig(TimestepsConfig):
    """Heavy in the middle, with neither end left out."""

    scale: float = setting(1.29, "weight of the middle; 0 is uniform", gt=-1, lt=1.75)

    def density(self, path: Path) -> SmoothDensity:
        return Mode(self.scale)


@dataclass(frozen=True)
class CosMap:
    """t = 1 - 1 / (tan(pi u / 2) + 1), that is sigma = tan(pi u / 2). Source: Esser et al., arXiv 2403.03206, eq. 21.

    On a variance-preserving path u is then linear in the angle between signal and noise.
    """

    def quantile(self, u: Tensor) -> Tensor:
        tangent = torch.tan(0.5 * torch.pi * u)
        return tangent / (1.0 + tangent)

    def distribution(self, log_sigma: Tensor) -> Tensor:
        return torch.atan(torch.exp(log_sigma)) / (0.5 * torch.pi)

    def log_sigma_density(self, log_sigma: Tensor) -> Tensor:
        return 1.0 / (torch.pi * torch.cosh(log_sigma))


@dataclass(kw_only=True)
class CosMapConfig(TimestepsConfig):
    """The cosine schedule's noise levels."""

    def density(self, path: Path) -> SmoothDensity:
        return CosMap()


@dataclass(frozen=True)
class Laplace:
    """ln snr = -2 ln sigma ~ Laplace(mean, scale), which is ln sigma ~ Laplace(-mean / 2, scale / 2).

    Source: Hang et al., "Improved noise schedule for diffusion training", arXiv 2407.03297.
    """

    mean: float = 0.0
    scale: float = 0.5

    def quantile(self, u: Tensor) -> Tensor:
        # Each half from its own end, so that neither tail is a difference of close numbers.
        distance = -torch.log(2.0 * torch.minimum(u, 1.0 - u))
        return torch.sigmoid(-0.5 * self.mean + 0.5 * self.scale * distance * torch.sign(u - 0.5))

    def distribution(self, log_sigma: Tensor) -> Tensor:
        z = (log_sigma + 0.5 * self.mean) / (0.5 * self.scale)
        tail = 0.5 * torch.exp(-z.abs())
        return torch.where(z < 0, tail, 1.0 - tail)

    def log_sigma_density(self, log_sigma: Tensor) -> Tensor:
        return torch.exp(-(log_sigma + 0.5 * self.mean).abs() / (0.5 * self.scale)) / self.scale


@dataclass(kw_only=True)
class LaplaceConfig(TimestepsConfig):
    """Laplace in ln(snr)."""

    mean: float = setting(0.0, "mean of ln(snr)")
    scale: float = setting(0.5, "mean distance of ln(snr) from its mean", ge=0.01, le=100)

    def density(self, path: Path) -> SmoothDensity:
        return Laplace(self.mean, self.scale)


class UniformIndex:
    """Uniform over a DDPM path's indices: real ones in [0, T - 1], or integers, each as the interval around it."""

    def __init__(self, path: IndexedPath) -> None:
        self.path = path
        margin = 0.5 if path.discrete else 0.0
        self.first, self.count = -margin, path.num_indices - 1 + 2 * margin

    def quantile(self, u: Tensor) -> Tensor:
        return self.path.index_to_t(self.first + self.count * u)

    def distribution(self, log_sigma: Tensor) -> Tensor:
        return ((self.path.log_sigma_to_index(log_sigma) - self.first) / self.count).clamp(0.0, 1.0)

    def log_sigma_density(self, log_sigma: Tensor) -> Tensor:
        index = self.path.log_sigma_to_index(log_sigma)
        below = index.floor().clamp(0, self.path.num_indices - 2)
        step = self.path.index_to_log_sigma(below + 1) - self.path.index_to_log_sigma(below)
        inside = (index >= self.first) & (index <= self.first + self.count)
        return inside / (step * self.count)


def uniform_density(path: Path) -> SmoothDensity:
    """Uniform over a path's indices; over t where it has none."""
    return UniformIndex(path) if has_indices(path) else Uniform()
