"""`objective.timestep_sampler`: from its name and keys to a density of t and to what draws from it."""

import math
from pathlib import Path as FilePath
from typing import Any

import torch

from torchtitan.diffusion.paths import Path, has_indices, indexed
from torchtitan.diffusion.timesteps.densities import (
    CosMap,
    Density,
    Laplace,
    LogitNormal,
    Mode,
    OnContinuousIndices,
    OnDiscreteIndices,
    Shifted,
    SmoothDensity,
    Truncated,
    uniform_density,
)
from torchtitan.diffusion.timesteps.learning import (
    AdaptiveLogSNR,
    LossSecondMoment,
    TimeWarping,
    equal_mass_edges,
    equal_width_edges,
    index_edges,
)
from torchtitan.diffusion.timesteps.sampler import TimestepSampler
from torchtitan.diffusion.timesteps.shares import AllocatedTimesteps, bin_masses
from torchtitan.diffusion.timesteps.slot_edges import read_slot_edges, slot_positions, slot_unit
from torchtitan.diffusion.timesteps.warps import Beta, Cubic, Steps, Warped, speed_warp

# Samplers that learn from losses, which draws they change: those of `objective.base_density`.
LEARNING = ("loss_second_moment", "time_warping", "adaptive_log_snr")


def build_sampler(config: Any, path: Path, seed: int) -> TimestepSampler:
    """What draws the timesteps of an `[objective]` section.

    Its `density` is the objective's: that of the mean loss, and what evaluation takes timesteps from. A sampler of
    importance weights, or with a state, draws from another.

    Raises:
        ValueError: the sampler is not possible on this path, or its density lies outside the times allowed.
    """
    name, arguments = config.timestep_sampler, (build_density(config, path), seed, config.spread)
    density = arguments[0]
    if name == "loss_second_moment":
        if not path.discrete:
            raise ValueError("loss_second_moment keeps losses of every index, and the path has no integer ones")
        return LossSecondMoment(*arguments, edges=index_edges(indexed(path)))
    if name == "time_warping":
        return TimeWarping(*arguments, edges=equal_mass_edges(density), half_life=config.loss_half_life)
    if name == "adaptive_log_snr":
        return AdaptiveLogSNR(*arguments, edges=equal_width_edges(density), half_life=config.loss_half_life)
    if name == "slots" and config.slot_importance:
        slots = len(given_slot_edges(config, path)) - 1
        # All slots have the same mass, before any cut.
        quantiles = torch.arange(1, slots, dtype=torch.float64) / slots
        edges = _smooth_density(config, path, "slots").quantile(quantiles).to(torch.float32)
        objective_density = _on_path(_smooth_density(config, path, "uniform"), path, config)
        sampler = AllocatedTimesteps(objective_density, seed, config.spread, edges=edges)
        sampler.set_shares(bin_masses(density, edges))
        return sampler
    return TimestepSampler(*arguments)


def build_density(config: Any, path: Path) -> Density:
    """The density of t that a configuration asks for, on this path; of a sampler that learns, the one it begins with.

    Raises:
        ValueError: it lies outside the times of the path's indices, or the range allowed; slot edges that are wrong.
    """
    name = config.base_density if config.timestep_sampler in LEARNING else config.timestep_sampler
    return _on_path(_smooth_density(config, path, name), path, config)


def given_slot_edges(config: Any, path: Path) -> list[float]:
    """Edges of the slots, from the section itself or from the file that it names.

    Raises:
        ValueError: the file cannot be used.
    """
    if config.slot_edges_path:
        return read_slot_edges(FilePath(config.slot_edges_path), slot_unit(path))
    return config.slot_edges


def _smooth_density(config: Any, path: Path, name: str) -> SmoothDensity:
    uniform = uniform_density(path)

    def slots() -> SmoothDensity:
        positions = slot_positions(given_slot_edges(config, path), path, uniform)
        return Warped(uniform, Steps(positions, [1.0] * (len(positions) - 1)))

    def speed() -> SmoothDensity:
        if not has_indices(path):
            raise ValueError("speed looks at how the noise of a DDPM path grows from index to index")
        return Warped(uniform, speed_warp(path, uniform, config.speed_ratio))

    density: SmoothDensity = {
        "uniform": lambda: uniform,
        "logit_normal": lambda: LogitNormal(config.logit_mean, config.logit_std),
        "lognormal_sigma": lambda: LogitNormal(config.p_mean, config.p_std),
        "laplace": lambda: Laplace(config.laplace_mean, config.laplace_scale),
        "mode": lambda: Mode(config.mode_scale),
        "cosmap": CosMap,
        "cubic": lambda: Warped(uniform, Cubic(config.cubic_towards)),
        "beta": lambda: Warped(uniform, Beta(config.beta_a, config.beta_b)),
        "speed": speed,
        "slots": slots,
    }[name]()
    return Shifted(density, config.shift) if config.shift != 1.0 else density


def _on_path(density: SmoothDensity, path: Path, config: Any) -> Density:
    t_min, t_max = config.t_min, config.t_max
    if has_indices(path):
        return (OnDiscreteIndices if path.discrete else OnContinuousIndices)(density, path, t_min, t_max)
    if (t_min, t_max) == (0.0, 1.0):
        return density
    return Truncated(density, _logit(t_min), _logit(t_max))


def _logit(t: float) -> float:
    if t in (0.0, 1.0):
        return math.inf if t else -math.inf
    return math.log(t) - math.log1p(-t)
