"""Densities made from a uniform one by moving its quantiles: x in (0, 1) has its own density instead of being u.

Where the base is uniform in t, x is t; where it is uniform over a DDPM path's indices, x is the index over T.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from torchtitan.device_tables import DeviceTables
from torchtitan.diffusion.paths import IndexedPath, Path, has_indices
from torchtitan.diffusion.timesteps.placement import SmoothDensity
from torchtitan.diffusion.timesteps.sampler import TimestepsConfig, uniform_density
from torchtitan.settings import setting

# Source: Wang et al., "A closer look at time steps is worthy of triple speed-up for diffusion model training",
# arXiv 2405.17403, and its published code.
SPEED_SLOPE = 1e-4

_CELLS = 4096  # of the table of a Beta distribution
_NEWTON_STEPS = 5
# 3-point Gauss-Legendre on [-1, 1].
_NODES, _NODE_WEIGHTS = (-math.sqrt(0.6), 0.0, math.sqrt(0.6)), (5 / 9, 8 / 9, 5 / 9)


class Warp(Protocol):
    """Warp: a distribution of x on (0, 1); all in float64."""

    def quantile(self, u: Tensor) -> Tensor:
        """Quantile: inverse distribution function."""

    def distribution(self, x: Tensor) -> Tensor:
        """Distribution function: probability of a smaller x."""

    def density(self, x: Tensor) -> Tensor:
        """Probability density at 0 < x < 1."""


@dataclass(frozen=True)
class Warped:
    """Density of base.quantile(x) with x drawn from a warp instead of uniformly."""

    base: SmoothDensity
    warp: Warp

    def quantile(self, u: Tensor) -> Tensor:
        return self.base.quantile(self.warp.quantile(u))

    def distribution(self, log_sigma: Tensor) -> Tensor:
        return self.warp.distribution(self.base.distribution(log_sigma))

    def log_sigma_density(self, log_sigma: Tensor) -> Tensor:
        # A warp may be infinite at 0 and 1, which rounding alone leads to.
        x = self.base.distribution(log_sigma.to(torch.float64)).clamp(1e-300, 1.0 - 2.0**-53)
        return self.base.log_sigma_density(log_sigma) * self.warp.density(x)


@dataclass(frozen=True)
class Cubic:
    """x = 1 - u^3 (Mou et al., "T2I-Adapter", arXiv 2302.08453) towards noise, x = u^3 towards data, of uniform u."""

    towards: Literal["noise", "data"]

    def quantile(self, u: Tensor) -> Tensor:
        return u**3 if self.towards == "data" else 1.0 - (1.0 - u) ** 3

    def distribution(self, x: Tensor) -> Tensor:
        return x ** (1 / 3) if self.towards == "data" else 1.0 - (1.0 - x) ** (1 / 3)

    def density(self, x: Tensor) -> Tensor:
        return (x if self.towards == "data" else 1.0 - x) ** (-2 / 3) / 3.0


@dataclass(kw_only=True)
class CubicConfig(TimestepsConfig):
    """Oversample one end."""

    towards: Literal["noise", "data"] = setting(
        "noise", "end to oversample: noise (which decides content) or data (style)"
    )

    def density(self, path: Path) -> SmoothDensity:
        return Warped(uniform_density(path), Cubic(self.towards))


class _BetaTable(NamedTuple):
    """Table of the distribution of y = logit x on equally spaced points.

    low, step: the first point and the distance of two.
    columns: the distribution, and its slope times the step, [N + 1] each.
    """

    low: float
    step: float
    columns: DeviceTables


@dataclass(frozen=True)
class Beta:
    """x ~ Beta(a, b), 0.2 <= a, b <= 50: mean a / (a + b).

    Source: Zheng et al., "Beta-tuned timestep diffusion model", ECCV 2024, for timesteps of diffusion. Distribution and
    quantile are cubic Hermite interpolations in logit x, where the density is smooth, accurate to 1e-8.
    """

    a: float
    b: float
    _table: _BetaTable = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_table", _beta_table(self.a, self.b))

    def quantile(self, u: Tensor) -> Tensor:
        low, step, columns = self._table
        cumulative, slope = columns.on(u.device)
        cell = (torch.searchsorted(cumulative, u, right=True) - 1).clamp(0, _CELLS - 1)
        left, linear, square, cube = _hermite(cumulative, slope, cell)
        rise = (cumulative[cell + 1] - left).clamp_min(torch.finfo(torch.float64).tiny)
        part = ((u - left) / rise).clamp(0.0, 1.0)
        for _ in range(_NEWTON_STEPS):
            missing = u - (left + part * (linear + part * (square + part * cube)))
            tangent = linear + part * (2.0 * square + 3.0 * part * cube)
            part = (part + missing / tangent.clamp_min(torch.finfo(torch.float64).tiny)).clamp(0.0, 1.0)
        return torch.sigmoid(low + step * (cell + part))

    def distribution(self, x: Tensor) -> Tensor:
        low, step, columns = self._table
        cumulative, slope = columns.on(x.device)
        place = ((torch.logit(x.to(torch.float64)) - low) / step).clamp(0.0, float(_CELLS))
        cell = place.floor().clamp(max=_CELLS - 1).long()
        left, linear, square, cube = _hermite(cumulative, slope, cell)
        part = place - cell
        return left + part * (linear + part * (square + part * cube))

    def density(self, x: Tensor) -> Tensor:
        return torch.exp((self.a - 1.0) * torch.log(x) + (self.b - 1.0) * torch.log1p(-x) - _log_beta(self.a, self.b))


@dataclass(kw_only=True)
class BetaConfig(TimestepsConfig):
    """Beta(a, b), of t or of the index over T."""

    a: float = setting(1.5, "a of Beta(a, b): below 1 dense at data, above 1 sparse there", ge=0.2, le=50)
    b: float = setting(1.0, "b of Beta(a, b): below 1 dense at noise, above 1 sparse there", ge=0.2, le=50)

    def density(self, path: Path) -> SmoothDensity:
        return Warped(uniform_density(path), Beta(self.a, self.b))


def _hermite(values: Tensor, slopes: Tensor, cell: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Coefficients of 1, s, s^2, s^3 on 0 <= s <= 1 of the cubic with given values and slopes at a cell's ends."""
    left, rise, first, last = values[cell], values[cell + 1] - values[cell], slopes[cell], slopes[cell + 1]
    return left, first, 3.0 * rise - 2.0 * first - last, first + last - 2.0 * rise


def _beta_table(a: float, b: float) -> _BetaTable:
    smallest = math.log(2.0**-60)  # probability beyond either end
    low = (smallest + math.log(a) + _log_beta(a, b)) / a
    high = -(smallest + math.log(b) + _log_beta(a, b)) / b
    step = (high - low) / _CELLS

    def slope(y: Tensor) -> Tensor:
        logarithm = a * torch.nn.functional.logsigmoid(y) + b * torch.nn.functional.logsigmoid(-y)
        return torch.exp(logarithm - _log_beta(a, b))

    points = low + step * torch.arange(_CELLS + 1, dtype=torch.float64)
    middles = points[:-1] + 0.5 * step
    nodes = zip(_NODES, _NODE_WEIGHTS, strict=True)
    sums = sum((weight * slope(middles + 0.5 * step * node) for node, weight in nodes), start=torch.zeros(()))
    masses = 0.5 * step * sums
    cumulative = torch.cat((points.new_zeros(1), masses.cumsum(0)))
    return _BetaTable(low, step, DeviceTables(cumulative / cumulative[-1], step * slope(points)))


def _log_beta(a: float, b: float) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)


class Steps:
    """Piecewise constant: x in [edges[k], edges[k + 1]] with probability masses[k], uniform inside."""

    def __init__(self, edges: Sequence[float], masses: Sequence[float]) -> None:
        """edges: rising, [K + 1], from 0 to 1. masses: [K], positive, of any sum. Raises ValueError: otherwise."""
        self.edges = torch.tensor(edges, dtype=torch.float64)
        weights = torch.tensor(masses, dtype=torch.float64)
        rising = len(edges) == len(masses) + 1 and (self.edges.diff() > 0).all()
        if not (rising and edges[0] == 0 and edges[-1] == 1 and (weights > 0).all()):
            raise ValueError(f"edges {list(edges)} must rise from 0 to 1 and masses {list(masses)} be positive")
        self.masses = weights / weights.sum()
        self.cumulative = torch.cat((weights.new_zeros(1), self.masses.cumsum(0)))
        self.cumulative[-1] = 1.0
        self._tables = DeviceTables(self.edges, self.cumulative, self.masses / self.edges.diff())

    def quantile(self, u: Tensor) -> Tensor:
        edges, cumulative, _ = self._tables.on(u.device)
        return _interpolated(cumulative, edges, u)

    def distribution(self, x: Tensor) -> Tensor:
        edges, cumulative, _ = self._tables.on(x.device)
        return _interpolated(edges, cumulative, x)

    def density(self, x: Tensor) -> Tensor:
        edges, _, heights = self._tables.on(x.device)
        place = torch.searchsorted(edges, x, right=True) - 1
        return heights[place.clamp(0, len(heights) - 1)]


def _interpolated(points: Tensor, values: Tensor, wanted: Tensor) -> Tensor:
    cell = (torch.searchsorted(points, wanted, right=True) - 1).clamp(0, len(points) - 2)
    part = (wanted - points[cell]) / (points[cell + 1] - points[cell])
    return torch.lerp(values[cell], values[cell + 1], part)


def speed_start(path: IndexedPath) -> int:
    """SpeeD's tau: the first index at which the noise b = sqrt(1 - alpha_bar) has grown by less than 1e-4 in one step.

    The steps from there on add little information: 642 of 1000 on the linear schedule. T where there is none.
    """
    growth = (1.0 - path.alphas_cumprod).sqrt().diff()
    slow = (growth < SPEED_SLOPE).nonzero().flatten()
    return int(slow[0]) + 1 if len(slow) else path.num_indices


def speed_warp(path: IndexedPath, base: SmoothDensity, ratio: float) -> Steps:
    """SpeeD's distribution: each index below tau is `ratio` times as likely as one from tau on.

    P = k / (T + tau (k - 1)) below tau and 1 / (T + tau (k - 1)) beyond, with k = ratio > 0.

    Raises:
        ValueError: the path's noise grows throughout, so that there is no tau.

    Source: Wang et al., arXiv 2405.17403.
    """
    tau = speed_start(path)
    if tau >= path.num_indices:
        raise ValueError("the path's noise grows by 1e-4 or more at every index")
    edge = base.distribution(path.index_to_log_sigma(torch.tensor([tau - 0.5], dtype=torch.float64))).item()
    return Steps([0.0, edge, 1.0], [ratio * edge, 1.0 - edge])


@dataclass(kw_only=True)
class SpeedConfig(TimestepsConfig):
    """SpeeD's indices, on a DDPM path."""

    ratio: float = setting(
        5.0, "how much more often early indices are drawn than those where the noise has nearly stopped growing: SpeeD's k",
        ge=1, le=1000,
    )

    def density(self, path: Path) -> SmoothDensity:
        if not has_indices(path):
            raise ValueError("speed looks at how the noise of a DDPM path grows from index to index")
        uniform = uniform_density(path)
        return Warped(uniform, speed_warp(path, uniform, self.ratio))

    def problems(self, path: Path, path_name: str) -> Iterator[tuple[str, str]]:
        if not path.num_indices:
            yield "name", (
                f"{self.name} goes by how noise grows along a DDPM's indices, and objective.path = {path_name} has none"
                " (use a ddpm path, or cubic)"
            )
