"""Learned variance of the reverse step: a second output of the network, trained by the variational bound.

Source: Nichol and Dhariwal, "Improved denoising diffusion probabilistic models", arXiv 2102.09672, section 3.1.
"""

import math

import torch
from torch import Tensor

from torchtitan.diffusion.paths import IndexedPath, per_image

# L_hybrid = L_simple + 0.001 L_vlb, eq. 16.
BOUND_WEIGHT = 1e-3
# Images are thought of as 256 levels from -1 to 1.
_HALF_LEVEL = 1.0 / 255.0
_OUTERMOST_LEVEL = 0.999
_FARTHEST = -1e4  # standard deviations; log_ndtr is finite there
_CLOSEST = 1e-7  # of two logarithms in float32


def log_variance(path: IndexedPath, interpolation: Tensor, index: Tensor) -> Tensor:
    """Log variance of the reverse step, ln of exp(v ln beta + (1 - v) ln posterior variance), eq. 15.

    Args:
        interpolation: the network's second output, [B, ...]; -1 stands for v = 0, and 1 for v = 1.
        index: integer indices [B].

    Returns:
        float32 of interpolation's shape. At index 0, where the posterior's variance is 0, that of index 1 is used.
    """
    _, _, low, high = _constants(path, index, interpolation)
    return _log_variance(low, high, interpolation)


def variational_bound(
    path: IndexedPath, x0: Tensor, x_t: Tensor, x0_estimate: Tensor, interpolation: Tensor, index: Tensor
) -> Tensor:
    """Variational bound's term of one index, in bits per dimension: eq. 4 to 6.

    At index 0 it is -log2 of the probability of x0's level under the reverse step, elsewhere the divergence of
    the reverse step from the posterior. The bound itself is the sum over all T indices.

    Args:
        x0, x_t: clean and noisy images, [B, ...].
        x0_estimate: the network's estimate of x0; without gradient to train the variance alone.
        interpolation: the network's second output, of x0's shape.
        index: integer indices [B].

    Returns:
        mean over the dimensions, [B].
    """
    of_x0, of_x_t, log_true, log_beta = _constants(path, index, x0)
    from_x_t = of_x_t * x_t
    estimate = of_x0 * x0_estimate + from_x_t
    log_estimated = _log_variance(log_true, log_beta, interpolation)
    distance = (of_x0 * x0 + from_x_t - estimate) ** 2
    divergence = 0.5 * (
        log_estimated - log_true - 1.0 + torch.exp(log_true - log_estimated) + distance * torch.exp(-log_estimated)
    )
    nats = torch.where(per_image(index, x0) == 0, -_log_level_probability(x0, estimate, log_estimated), divergence)
    return nats.flatten(1).mean(1) / math.log(2.0)


def _log_level_probability(x: Tensor, mean: Tensor, log_variance: Tensor) -> Tensor:
    """Log of a Gaussian's mass on the level of width 2 / 255 around x; the outermost levels reach to infinity."""
    inverse_deviation = torch.exp(-0.5 * log_variance)
    above, below = (x - mean + _HALF_LEVEL) * inverse_deviation, (x - mean - _HALF_LEVEL) * inverse_deviation
    # In the lower tail, where differences of small numbers stay exact: P(below < z < above) = P(-above < z < -below).
    # As logarithms: far from the mean the mass itself is 0 in float32, and its logarithm would have no gradient.
    upper = x > mean
    high, low = (
        torch.special.log_ndtr(torch.where(upper, one, other).clamp_min(_FARTHEST))
        for one, other in ((-below, above), (-above, below))
    )
    inner = high + torch.log(-torch.expm1((low - high).clamp_max(-_CLOSEST)))
    outer = torch.special.log_ndtr(torch.where(x < 0, above, -below).clamp_min(_FARTHEST))
    return torch.where(x.abs() > _OUTERMOST_LEVEL, outer, inner)


def _log_variance(low: Tensor, high: Tensor, interpolation: Tensor) -> Tensor:
    fraction = 0.5 * (interpolation + 1.0)
    return fraction * high + (1.0 - fraction) * low


def _constants(path: IndexedPath, index: Tensor, images: Tensor) -> tuple[Tensor, ...]:
    """Constants of the reverse step at indices [B], over images [B, ...]: see DDPM.reverse_step."""
    (table,) = path.reverse_step.on(index.device)
    return tuple(per_image(column, images) for column in table.index_select(0, index).unbind(1))
