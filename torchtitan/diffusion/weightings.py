"""Weightings of the squared error by noise level, each declared in one parametrisation.

A weighting gives the weight of the squared error of x0, or of the noise, at a noise level. It is converted to the
prediction in use, so that its meaning does not depend on the prediction type. snr = 1 / sigma^2 throughout.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchtitan.diffusion.paths import Path
from torchtitan.diffusion.predictions import noise_error_weight
from torchtitan.settings import Registry, setting

# 1 - t in float32 has no finer steps; below the lower one no float32 draw of t falls.
_SIGMA_RANGE = (2.0**-60, 2.0**24)


@dataclass(kw_only=True)
class WeightingConfig(ABC):
    """`[objective.weighting]`; parametrisation: weighted error: of x0, noise or the prediction in use; no key."""

    name: str = setting(
        "", "factor on the squared error as a function of the noise level, independent of the parametrisation"
    )

    parametrisation = "x0"

    @abstractmethod
    def weight(self, snr: Tensor, sigma_data: float) -> Tensor:
        """Weight at signal-to-noise ratios, float64; sigma_data: standard deviation of the data."""


@dataclass(kw_only=True)
class NoWeightingConfig(WeightingConfig):
    """1."""

    parametrisation = "prediction"

    def weight(self, snr: Tensor, sigma_data: float) -> Tensor:
        return torch.ones_like(snr)


@dataclass(kw_only=True)
class MinSNRConfig(WeightingConfig):
    """min(snr, gamma). Source: Hang et al., arXiv 2303.09556, section 3.4."""

    gamma: float = setting(5.0, "signal-to-noise ratio above which the weight stops growing", gt=0)

    def weight(self, snr: Tensor, sigma_data: float) -> Tensor:
        return snr.clamp(max=self.gamma)


@dataclass(kw_only=True)
class SoftMinSNRConfig(MinSNRConfig):
    """snr gamma / (snr + gamma). Source: Crowson et al., arXiv 2401.11605, section 4.4."""

    def weight(self, snr: Tensor, sigma_data: float) -> Tensor:
        return snr * self.gamma / (snr + self.gamma)


@dataclass(kw_only=True)
class SNRPlusOneConfig(WeightingConfig):
    """snr + 1. Source: Salimans and Ho, "Progressive distillation", arXiv 2202.00512, section 4."""

    def weight(self, snr: Tensor, sigma_data: float) -> Tensor:
        return snr + 1.0


@dataclass(kw_only=True)
class TruncatedSNRConfig(WeightingConfig):
    """max(snr, 1). Source: Salimans and Ho, "Progressive distillation", arXiv 2202.00512, section 4."""

    def weight(self, snr: Tensor, sigma_data: float) -> Tensor:
        return snr.clamp(min=1.0)


@dataclass(kw_only=True)
class EDMWeightingConfig(WeightingConfig):
    """(sigma^2 + sigma_data^2) / (sigma sigma_data)^2. Source: Karras et al., arXiv 2206.00364, Table 1."""

    def weight(self, snr: Tensor, sigma_data: float) -> Tensor:
        return snr + sigma_data**-2


@dataclass(kw_only=True)
class P2Config(WeightingConfig):
    """(1 + snr)^-gamma. Source: Choi et al., "Perception prioritized training", arXiv 2204.00227, eq. 8."""

    gamma: float = setting(1.0, "gamma of (1 + snr)^-gamma", ge=0)

    parametrisation = "noise"

    def weight(self, snr: Tensor, sigma_data: float) -> Tensor:
        return (1.0 + snr) ** -self.gamma


@dataclass(kw_only=True)
class VelocityConfig(WeightingConfig):
    """1 / max(t, floor)^2: the velocity's error, since (error of the velocity) = (error of x0) / t on every path.

    Source: Li and He, "Back to basics: let denoising generative models denoise", arXiv 2511.13720, whose time is 1 - t.
    """

    floor: float = setting(0.05, "time below which the weight stops growing", ge=0, lt=1)

    def weight(self, snr: Tensor, sigma_data: float) -> Tensor:
        t = 1.0 / (1.0 + snr.sqrt())
        return t.clamp(min=self.floor) ** -2


WEIGHTINGS: Registry[type[WeightingConfig]] = Registry("torchtitan.diffusion", {
    "none": "weightings.NoWeightingConfig",
    "min_snr": "weightings.MinSNRConfig",
    "soft_min_snr": "weightings.SoftMinSNRConfig",
    "snr_plus_one": "weightings.SNRPlusOneConfig",
    "truncated_snr": "weightings.TruncatedSNRConfig",
    "edm": "weightings.EDMWeightingConfig",
    "p2": "weightings.P2Config",
    "velocity": "weightings.VelocityConfig",
}, type[WeightingConfig])


def prediction_weighting(config: Any, path: Path) -> Callable[[Tensor], Tensor]:
    """Weight on the squared error of the prediction itself, of an `[objective]` section: noise levels b / a [N] -> [N]."""
    if isinstance(config.weighting, NoWeightingConfig):
        return torch.ones_like
    return partial(_prediction_weight, config, path)


def _prediction_weight(config: Any, path: Path, sigma: Tensor) -> Tensor:
    weighting = config.weighting
    level = sigma.to(torch.float64).clamp(*_SIGMA_RANGE)
    weight = weighting.weight(level**-2, config.sigma_data)
    if weighting.parametrisation != "prediction":
        noise_weight = weight * level**2 if weighting.parametrisation == "x0" else weight
        a, _ = path.coefficients(path.sigma_to_t(level))
        weight = noise_weight / noise_error_weight(config.prediction, level, a, config.sigma_data)
    return weight.to(sigma.dtype)
