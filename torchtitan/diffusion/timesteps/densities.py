"""Densities of the training timestep t on (0, 1), all in the common coordinate ln sigma = logit t."""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from torchtitan.diffusion.paths import IndexedPath, Path, has_indices


class Density(Protocol):
    """A probability density of t on (0, 1)."""

    def quantile(self, u: Tensor) -> Tensor:
        """Inverse distribution function; u and the result are float64 in (0, 1)."""

    def log_sigma_density(self, log_sigma: Tensor) -> Tensor:
        """Density of ln sigma = logit t at the given values."""


class SmoothDensity(Density, Protocol):
    """A density that others can be made of."""

    def distribution(self, log_sigma: Tensor) -> Tensor:
        """Probability of a smaller ln sigma: what quantile inverts; float64."""


@dataclass(frozen=True)
class Uniform:
    """t ~ U(0, 1), which is ln sigma ~ Logistic(0, 1)."""

    def quantile(self, u: Tensor) -> Tensor:
        return u

    def distribution(self, log_sigma: Tensor) -> Tensor:
        return torch.sigmoid(log_sigma)

    def log_sigma_density(self, log_sigma: Tensor) -> Tensor:
        return torch.sigmoid(log_sigma) * torch.sigmoid(-log_sigma)


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


@dataclass(frozen=True)
class Mode:
    """t = 1 - u - scale (cos^2(pi u / 2) - 1 + u) of uniform u: heavy in the middle for a positive scale.

    -1 < scale < 2 / (pi - 2) = 1.7519. Source: Esser et al., arXiv 2403.03206, eq. 20. With 1 - u in the place of
    u, so that t rises with u: t = u + scale (u - sin^2(pi u / 2)).
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


@dataclass(frozen=True)
class Shifted:
    """t' = factor t / (1 + (factor - 1) t) of another density's t, which adds ln factor to ln sigma.

    Source: Esser et al., arXiv 2403.03206, eq. 23, with factor sqrt(m / n) for m instead of n pixels.
    """

    density: SmoothDensity
    factor: float

    def quantile(self, u: Tensor) -> Tensor:
        t = self.density.quantile(u)
        return self.factor * t / (1.0 + (self.factor - 1.0) * t)

    def distribution(self, log_sigma: Tensor) -> Tensor:
        return self.density.distribution(log_sigma - math.log(self.factor))

    def log_sigma_density(self, log_sigma: Tensor) -> Tensor:
        return self.density.log_sigma_density(log_sigma - math.log(self.factor))


class Truncated:
    """Another density, restricted to a range of ln sigma."""

    def __init__(self, density: SmoothDensity, low: float, high: float) -> None:
        """Cut off what lies below ln sigma = low and above high, -inf <= low < high <= inf.

        Raises:
            ValueError: the density has no mass between them.
        """
        self.density, self.low, self.high = density, low, high
        ends = torch.tensor([low, high], dtype=torch.float64)
        self.t_low, self.t_high = torch.sigmoid(ends).tolist()
        self.below, above = density.distribution(ends).tolist()
        self.mass = _positive(above - self.below, self.t_low, self.t_high)

    def quantile(self, u: Tensor) -> Tensor:
        return self.density.quantile(self.below + self.mass * u).clamp(self.t_low, self.t_high)

    def distribution(self, log_sigma: Tensor) -> Tensor:
        return ((self.density.distribution(log_sigma) - self.below) / self.mass).clamp(0.0, 1.0)

    def log_sigma_density(self, log_sigma: Tensor) -> Tensor:
        inside = (log_sigma >= self.low) & (log_sigma <= self.high)
        return inside * self.density.log_sigma_density(log_sigma) / self.mass


class OnContinuousIndices(Truncated):
    """Another density, restricted to the times of the indices 0 .. T - 1 of a continuous DDPM path."""

    def __init__(self, density: SmoothDensity, path: IndexedPath, t_min: float = 0.0, t_max: float = 1.0) -> None:
        """t_min, t_max: a narrower range. Raises ValueError: the density has no mass there."""
        first, last = path.index_to_log_sigma(torch.tensor([0.0, path.num_indices - 1.0])).tolist()
        low, high = torch.logit(torch.tensor([t_min, t_max], dtype=torch.float64)).tolist()
        super().__init__(density, max(first, low), min(last, high))


class OnDiscreteIndices:
    """Another density in steps: each index has the mass between its neighbours' middles in ln sigma.

    What lies beyond half an interval outside the first and the last index is cut off.
    """

    def __init__(self, density: SmoothDensity, path: IndexedPath, t_min: float = 0.0, t_max: float = 1.0) -> None:
        """t_min, t_max: leave out the indices of other times, compared in float32. Raises ValueError: none is left."""
        self.path = path
        self.edges = path.index_to_log_sigma(torch.arange(path.num_indices + 1) - 0.5)  # [T + 1]
        self.times = path.index_to_t(torch.arange(path.num_indices))  # [T]
        t = self.times.to(torch.float32)
        low, high = torch.tensor([t_min, t_max], dtype=torch.float32)
        inside = ((t >= low) & (t <= high)).nonzero().flatten()
        if not len(inside):
            raise ValueError(f"no index of the path has a time from {t_min:.9g} to {t_max:.9g}")
        cumulative = density.distribution(self.edges)
        below, above = cumulative[inside[0]], cumulative[inside[-1] + 1]
        mass = _positive((above - below).item(), t[inside[0]].item(), t[inside[-1]].item())
        self.cumulative = ((cumulative - below) / mass).clamp(0.0, 1.0)
        self._tables: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def quantile(self, u: Tensor) -> Tensor:
        cumulative, times = self._tables_on(u.device)
        index = torch.searchsorted(cumulative, u, right=True) - 1
        return times[index.clamp(0, self.path.num_indices - 1)]

    def log_sigma_density(self, log_sigma: Tensor) -> Tensor:
        edges = self.edges.to(log_sigma.device)
        place = torch.searchsorted(edges, log_sigma.to(torch.float64), right=True) - 1
        inside = (place >= 0) & (place < self.path.num_indices)
        heights = self.cumulative.diff() / self.edges.diff()
        return inside * heights.to(log_sigma.device)[place.clamp(0, self.path.num_indices - 1)]

    def _tables_on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        if device not in self._tables:
            self._tables[device] = (self.cumulative.to(device), self.times.to(device))
        return self._tables[device]


def _positive(mass: float, t_low: float, t_high: float) -> float:
    if not mass > 1e-9:
        raise ValueError(f"the density has a mass of {mass:.1g} from t = {t_low:.6g} to {t_high:.6g}")
    return mass
