"""Registry of `objective.timesteps.name`, and the sampler of an `[objective]` section."""

from collections import ChainMap
from collections.abc import Callable, Mapping
from typing import Any

from torchtitan.diffusion.paths import Path
from torchtitan.diffusion.timesteps.placement import Density, Placement
from torchtitan.diffusion.timesteps.sampler import TimestepSampler, TimestepsConfig
from torchtitan.settings import Registry

# Densities that stay the same throughout a run; to add one: its file, and a line here.
DENSITIES: Registry[type[TimestepsConfig]] = Registry("torchtitan.diffusion.timesteps", {
    "uniform": "sampler.UniformConfig",
    "logit_normal": "sampler.LogitNormalConfig",
    "lognormal_sigma": "sampler.LognormalSigmaConfig",
    "laplace": "sampler.LaplaceConfig",
    "mode": "sampler.ModeConfig",
    "cosmap": "sampler.CosMapConfig",
    "cubic": "warps.CubicConfig",
    "beta": "warps.BetaConfig",
    "speed": "warps.SpeedConfig",
}, type[TimestepsConfig])
# Samplers with slots, or that learn; to add one: its file, and a line here.
SAMPLERS: Registry[type[TimestepsConfig]] = Registry("torchtitan.diffusion.timesteps", {
    "slots": "slots.SlotsConfig",
    "loss_second_moment": "learning.LossSecondMomentConfig",
    "time_warping": "learning.TimeWarpingConfig",
    "adaptive_log_snr": "learning.AdaptiveLogSNRConfig",
}, type[TimestepsConfig])
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
    return Placement(path, config.shift, config.t_min, config.t_max, config.two_times)
