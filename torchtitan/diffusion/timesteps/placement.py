"""Density of the training timestep, and its placement by the keys of `[objective]`: shifted, cut to the path and to a range."""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from torchtitan.device_tables import DeviceTables
from torchtitan.diffusion.paths import IndexedPath, Path, has_indices


class Density(Protocol):
    """Density: a probability density of t on (0, 1)."""

    def quantile(self, u: Tensor) -> Tensor:
        """Inverse distribution function; u and the result are float64 in (0, 1)."""

    def log_sigma_density(self, log_sigma: Tensor) -> Tensor:
        """Density of ln sigma = logit t at the given values."""


class SmoothDensity(Density, Protocol):
    """Smooth density, from which others can be made."""

    def distribution(self, log_sigma: Tensor) -> Tensor:
        """Distribution function: probability of a smaller ln sigma, the inverse of quantile; float64."""


@dataclass(frozen=True)
class Placement:
    """Placement: the range of the training timesteps, and their shift towards noise.

    Attributes:
        shift: factor on sigma.
        t_min, t_max: the range; indices of other times are left out.
        larger_of_two: whether t is the larger one of two independent draws, on a path without indices.
    """

    path: Path
    shift: float = 1.0
    t_min: float = 0.0
    t_max: float = 1.0
    larger_of_two: bool = False

    def shifted(self, density: SmoothDensity) -> SmoothDensity:
        return Shifted(density, self.shift) if self.shift != 1.0 else density

    def on_path(self, density: SmoothDensity) -> Density:
        """Density on the path: shifted, cut to the range, in steps if discrete. Raises ValueError: no mass, or no method."""
        kind = type(density)
        methods = ("quantile", "distribution", "log_sigma_density")
        lacking = [name for name in methods if getattr(kind, name, None) in (None, getattr(SmoothDensity, name))]
        if lacking:  # in a plugin's
            raise ValueError(f"{kind.__name__} has no method {', '.join(lacking)} (see SmoothDensity)")
        if not kind.__module__.startswith("torchtitan."):
            _check_consistent(density)
        density, t_min, t_max = self.shifted(density), self.t_min, self.t_max
        path = self.path
        if has_indices(path):
            return (OnDiscreteIndices if path.discrete else OnContinuousIndices)(density, path, t_min, t_max)
        if (t_min, t_max) != (0.0, 1.0):
            density = Truncated(density, _logit(t_min), _logit(t_max))
        return LargerOfTwo(density) if self.larger_of_two else density


LATENT_SIZE = "latent_size"


def latent_shift(image_shape: tuple[int, int, int]) -> float:
    """Factor on sigma for images or latents (C, H, W): sqrt(C H W / 4096), 1 for a latent of 4 x 32 x 32.

    Source: Zheng et al., "Diffusion transformers with representation autoencoders", arXiv 2510.11690, section 4.
    """
    return math.sqrt(math.prod(image_shape) / 4096)


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
        """Cut off ln sigma < low and > high, -inf <= low < high <= inf. Raises ValueError: no mass between."""
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


@dataclass(frozen=True)
class LargerOfTwo:
    """Larger t of two independent draws from a density: the square of its distribution function."""

    density: SmoothDensity

    def quantile(self, u: Tensor) -> Tensor:
        return self.density.quantile(u.sqrt())

    def distribution(self, log_sigma: Tensor) -> Tensor:
        return self.density.distribution(log_sigma).square()

    def log_sigma_density(self, log_sigma: Tensor) -> Tensor:
        return 2.0 * self.density.distribution(log_sigma) * self.density.log_sigma_density(log_sigma)

    def smaller(self, t: Tensor, u: Tensor) -> Tensor:
        """Quantile u [B] of the smaller draw, given the larger one t [B]; float64, at most t."""
        t = t.to(torch.float64)
        return torch.minimum(self.density.quantile(u * self.density.distribution(torch.logit(t))), t)


class OnContinuousIndices(Truncated):
    """Another density, restricted to the times of the indices 0 .. T - 1 of a continuous DDPM path."""

    def __init__(self, density: SmoothDensity, path: IndexedPath, t_min: float = 0.0, t_max: float = 1.0) -> None:
        """t_min, t_max: a narrower range. Raises ValueError: the density has no mass there."""
        first, last = path.index_to_log_sigma(torch.tensor([0.0, path.num_indices - 1.0])).tolist()
        low, high = torch.logit(torch.tensor([t_min, t_max], dtype=torch.float64)).tolist()
        super().__init__(density, max(first, low), min(last, high))


class OnDiscreteIndices:
    """Another density in steps: each index has the mass between its neighbours' middles in ln sigma.

    The mass beyond half an interval outside the first and the last index is cut off.
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
        self._steps = DeviceTables(self.cumulative, self.times)
        self._heights = DeviceTables(self.edges, self.cumulative.diff() / self.edges.diff())

    def quantile(self, u: Tensor) -> Tensor:
        cumulative, times = self._steps.on(u.device)
        index = torch.searchsorted(cumulative, u, right=True) - 1
        return times[index.clamp(0, self.path.num_indices - 1)]

    def log_sigma_density(self, log_sigma: Tensor) -> Tensor:
        edges, heights = self._heights.on(log_sigma.device)
        place = torch.searchsorted(edges, log_sigma.to(torch.float64), right=True) - 1
        inside = (place >= 0) & (place < self.path.num_indices)
        return inside * heights[place.clamp(0, self.path.num_indices - 1)]


def _check_consistent(density: SmoothDensity) -> None:
    """Check that the methods of a plugin's density describe one density, at nine quantiles. Raises ValueError."""
    u, h = (torch.arange(9, dtype=torch.float64) + 0.618) / 10, 1e-5  # between the round numbers, where slots meet
    below, at, above = (torch.logit(density.quantile(u + step).to(torch.float64)) for step in (-h, 0.0, h))
    # The slope of the quantile is 1 / density; the median, since a density in steps has jumps.
    product = (density.log_sigma_density(at) * (above - below) / (2 * h)).median().item()
    inverse = density.distribution(at).to(torch.float64)
    if not (torch.allclose(inverse, u, atol=1e-3) and abs(product - 1.0) < 0.01):
        raise ValueError(
            f"{type(density).__name__}: distribution(logit(quantile({u[4]:.3g}))) is {inverse[4]:.3g}, and log_sigma_density"
            f" times the slope of logit(quantile(u)) {product:.3g} instead of 1 (in float64, all three of one density of logit t)"
        )


def _positive(mass: float, t_low: float, t_high: float) -> float:
    if not mass > 1e-9:
        raise ValueError(f"the density has a mass of {mass:.1g} from t = {t_low:.6g} to {t_high:.6g}")
    return mass


def _logit(t: float) -> float:
    if t in (0.0, 1.0):
        return math.inf if t else -math.inf
    return math.log(t) - math.log1p(-t)
