"""Registry of densities of the training timestep by name; to add one: its file, and a line here."""

from torchtitan.diffusion.timesteps.densities import (
    CosMapConfig,
    LaplaceConfig,
    LogitNormalConfig,
    LognormalSigmaConfig,
    ModeConfig,
    UniformConfig,
)
from torchtitan.diffusion.timesteps.sampler import TimestepsConfig
from torchtitan.diffusion.timesteps.warps import BetaConfig, CubicConfig, SpeedConfig

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
