"""Registry of `objective.timesteps.name`, and the sampler of an `[objective]` section."""

from collections import ChainMap
from collections.abc import Callable, Mapping
from typing import Any

from torchtitan.diffusion.paths import Path
from torchtitan.diffusion.timesteps.contract import Density
from torchtitan.diffusion.timesteps.densities import (
    CosMapConfig,
    LaplaceConfig,
    LogitNormalConfig,
    LognormalSigmaConfig,
    ModeConfig,
    UniformConfig,
)
from torchtitan.diffusion.timesteps.learning import AdaptiveLogSNRConfig, LossSecondMomentConfig, TimeWarpingConfig
from torchtitan.diffusion.timesteps.placement import Placement
from torchtitan.diffusion.timesteps.sampler import TimestepSampler, TimestepsConfig
from torchtitan.diffusion.timesteps.slots import SlotsConfig
from torchtitan.diffusion.timesteps.warps import BetaConfig, CubicConfig, SpeedConfig

# Densities that stay the same throughout a run; to add one: its file, and a line here.
DENSITIES: dict[str, type[TimestepsConfig]] = {
    "uniform": UniformConfig,
    "logit_normal": LogitNormalConfig,
    "lognormal_sigma": LognormalSigmaConfig,
    "laplace": LaplaceConfig,
    "mode": ModeConfig,
    "cosmap": CosMapConfig,
    "cubic": CubicConfig,
    "beta": BetaConfig,
    "speed": SpeedConfig,
}
# Samplers with slots, or that learn; to add one: its file, and a line here.
SAMPLERS: dict[str, type[TimestepsConfig]] = {
    "slots": SlotsConfig,
    "loss_second_moment": LossSecondMomentConfig,
    "time_warping": TimeWarpingConfig,
    "adaptive_log_snr": AdaptiveLogSNRConfig,
}
TIMESTEPS: Mapping[str, type[TimestepsConfig]] = ChainMap(SAMPLERS, DENSITIES)

# (density, seed, spread) -> sampler of that density
SamplerOf = Callable[[Density, int, str], TimestepSampler]


def build_sampler(config: Any, path: Path, seed: int, sampler_of: SamplerOf | None = None) -> TimestepSampler:
    """Build the timestep sampler of an `[objective]` section.

    Its `density` is the objective's: that of the mean loss and of evaluation. A sampler with importance weights, or
    with a state, draws from another.

    Args:
        sampler_of: makes a sampler of the section's density, used instead of the section's own.

    Raises:
        ValueError: the sampler is not possible on this path, or its density lies outside the times allowed.
    """
    if sampler_of is not None:
        return sampler_of(build_density(config, path), seed, config.spread)
    return config.timesteps.sampler(_placement(config, path), seed, config.spread)


def build_density(config: Any, path: Path) -> Density:
    """Build the density of t of a section, on this path; of a learning sampler, the initial one.

    Raises:
        ValueError: it lies outside the times of the path's indices, or the range allowed; slot edges that are wrong.
    """
    return _placement(config, path).on_path(config.timesteps.density(path))


def _placement(config: Any, path: Path) -> Placement:
    return Placement(path, config.shift, config.t_min, config.t_max)
