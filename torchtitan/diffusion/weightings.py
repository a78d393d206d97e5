"""Weightings of the squared error by noise level, each declared in one parametrisation.

A weighting gives the weight of the squared error of x0, or of the noise, at a noise level. It is converted to the
prediction in use, so that its meaning does not depend on the prediction type. snr = 1 / sigma^2 throughout.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from torchtitan.diffusion.paths import Path
from torchtitan.diffusion.predictions import noise_error_weight

# 1 - t in float32 has no finer steps; below the lower one no float32 draw of t falls.
_SIGMA_RANGE = (2.0**-60, 2.0**24)


class Weighting(NamedTuple):
    """Weighting: a weight and the squared error that it applies to.

    Attributes:
        parametrisation: the weighted error: of x0, of the noise, or of the prediction in use.
        weight: as a function of snr, float64, and of the `[objective]` section.
    """

    parametrisation: Literal["x0", "noise", "prediction"]
    weight: Callable[[Tensor, Any], Tensor]


WEIGHTINGS: dict[str, Weighting] = {
    "none": Weighting("prediction", lambda snr, config: torch.ones_like(snr)),
    # Hang et al., "Efficient diffusion training via min-SNR weighting strategy", arXiv 2303.09556, section 3.4.
    "min_snr": Weighting("x0", lambda snr, config: snr.clamp(max=config.snr_gamma)),
    # Crowson et al., "Scalable high-resolution pixel-space image synthesis", arXiv 2401.11605, section 4.4.
    "soft_min_snr": Weighting("x0", lambda snr, config: snr * config.snr_gamma / (snr + config.snr_gamma)),
    # Salimans and Ho, "Progressive distillation", arXiv 2202.00512, section 4.
    "snr_plus_one": Weighting("x0", lambda snr, config: snr + 1.0),
    "truncated_snr": Weighting("x0", lambda snr, config: snr.clamp(min=1.0)),
    # Karras et al., arXiv 2206.00364, Table 1: (sigma^2 + sigma_data^2) / (sigma sigma_data)^2.
    "edm": Weighting("x0", lambda snr, config: snr + config.sigma_data**-2),
    # Choi et al., "Perception prioritized training", arXiv 2204.00227, eq. 8.
    "p2": Weighting("noise", lambda snr, config: (config.p2_k + snr) ** -config.p2_gamma),
}


def prediction_weight(config: Any, path: Path, sigma: Tensor) -> Tensor:
    """Weight on the squared error of the prediction itself.

    Args:
        config: the `[objective]` section.
        path: of the prediction's coefficients.
        sigma: noise levels b / a, [N].

    Returns:
        the weights, [N], of sigma's dtype.
    """
    weighting = WEIGHTINGS[config.weighting]
    level = sigma.to(torch.float64).clamp(*_SIGMA_RANGE)
    weight = weighting.weight(level**-2, config)
    if weighting.parametrisation != "prediction":
        noise_weight = weight * level**2 if weighting.parametrisation == "x0" else weight
        a, _ = path.coefficients(path.sigma_to_t(level))
        weight = noise_weight / noise_error_weight(config.prediction, level, a, config.sigma_data)
    return weight.to(sigma.dtype)
