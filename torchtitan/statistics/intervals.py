"""Confidence intervals of a ratio whose denominator may hardly differ from zero."""

import math
from collections.abc import Callable
from functools import wraps

import torch
from torch import Tensor

_INTERVALS = 512  # of Simpson's rule
_NEWTON_STEPS = 40

Number = Tensor | float
Interval = tuple[Number, Number, Tensor | bool]


def _floats_for_floats(function: Callable[..., tuple[Tensor, ...]]) -> Callable[..., Interval]:
    """Let a function of float64 tensors take floats too, and give floats where it got nothing else."""

    @wraps(function)
    def wrapped(*values: Number) -> Interval:
        results = function(*(torch.as_tensor(value, dtype=torch.float64) for value in values))
        return results if any(isinstance(value, Tensor) for value in values) else tuple(r.item() for r in results)

    return wrapped


@_floats_for_floats
def fieller(
    numerator: Tensor, denominator: Tensor, var_n: Tensor, var_d: Tensor, covariance: Tensor, quantile: Tensor
) -> Interval:
    """Fieller's confidence set {r: (n - r d)^2 <= q^2 (var_n - 2 r cov + r^2 var_d)} of the ratio of two means.

    It does not linearise the ratio, so it holds for a denominator near zero. The true denominator is taken to be
    non-negative, as |G|^2 is: an estimate below zero counts as zero.

    Args:
        numerator, denominator: estimates n and d, any shape; jointly about normal.
        var_n, var_d, covariance: of the estimates.
        quantile: q, of Student's t or the normal distribution.

    Returns:
        lower, upper and unbounded, of the same shape, or floats for floats. Unbounded, d <= q sqrt(var_d), means that
        the denominator cannot be told from zero: upper is then infinite, and lower is all that can be said, which is
        -infinity where the numerator is not clearly positive either or where a variance is not finite.

    Source: Fieller, "Some problems in interval estimation", J. R. Statist. Soc. B 16, 1954, section 3.
    """
    d = denominator.clamp_min(0.0)
    squared = quantile**2
    a = d**2 - squared * var_d
    half_b = numerator * d - squared * covariance
    c = numerator**2 - squared * var_n
    root = (half_b**2 - a * c).clamp_min(0.0).sqrt()
    # The roots of a r^2 - 2 half_b r + c, each without subtracting like numbers.
    lower = torch.where(half_b > 0, c / (half_b + root), (half_b - root) / a)
    upper = torch.where(half_b > 0, (half_b + root) / a, c / (half_b - root))
    known = (a + half_b + c).isfinite()
    unbounded = ~known | (a <= 0)
    lower = torch.where(known & (~unbounded | ((numerator > 0) & (c > 0))), lower, -torch.inf)
    return lower, torch.where(unbounded, torch.inf, upper), unbounded


@_floats_for_floats
def log_delta(
    numerator: Tensor, denominator: Tensor, var_n: Tensor, var_d: Tensor, covariance: Tensor, quantile: Tensor
) -> Interval:
    """Interval exp(log(n / d) +- q sigma) of a positive ratio, sigma the linearised standard error of the logarithm.

    Args, Returns: as in `fieller`. Unbounded by the same rule; nothing is said then, and lower is 0.
    """
    unbounded = ~(denominator > quantile * var_d.sqrt()) | ~(numerator > 0)
    ratio = numerator / denominator
    variance = var_n / numerator**2 - 2.0 * covariance / (numerator * denominator) + var_d / denominator**2
    factor = torch.exp(quantile * variance.clamp_min(0.0).sqrt())
    unbounded = unbounded | ~factor.isfinite()
    return torch.where(unbounded, 0.0, ratio / factor), torch.where(unbounded, torch.inf, ratio * factor), unbounded


def student_quantile(probability: float, degrees: Number) -> Number:
    """Quantile of Student's t for any degrees of freedom, also fractional ones; relative error below 1e-8.

    The probability is integrated by Simpson's rule in v, t = sqrt(degrees) sinh(v), where the density is proportional
    to cosh(v)^-degrees, and inverted by Newton's method, which rises to the solution from the normal quantile.

    Args:
        probability: 0.5 < probability <= 0.9995.
        degrees: of freedom, any shape; above 10^6 counted as that.

    Returns:
        t, of the same shape, or a float for a float; infinity below one degree of freedom, where it would be of no use.
    """
    asked = torch.as_tensor(degrees, dtype=torch.float64)
    nu = torch.where(asked >= 1.0, asked, 1.0).clamp_max(1e6)
    log_scale = torch.lgamma(0.5 * (nu + 1)) - torch.lgamma(0.5 * nu) - 0.5 * math.log(math.pi)
    simpson = torch.full((_INTERVALS + 1,), 2.0 / 3.0, dtype=torch.float64, device=nu.device)
    simpson[1::2] = 4.0 / 3.0
    simpson[0] = simpson[-1] = 1.0 / 3.0
    places = torch.linspace(0.0, 1.0, _INTERVALS + 1, dtype=torch.float64, device=nu.device)
    t = torch.special.ndtri(torch.full_like(nu, probability))
    for _ in range(_NEWTON_STEPS):
        end = torch.asinh(t / nu.sqrt())
        heights = torch.cosh(end[..., None] * places) ** -nu[..., None]  # [..., intervals + 1]
        area = torch.exp(log_scale) * (heights @ simpson) * end / _INTERVALS  # probability of 0 < T < t
        density = torch.exp(log_scale) / nu.sqrt() * (1.0 + t**2 / nu) ** (-0.5 * (nu + 1))
        t = t + (probability - 0.5 - area) / density
    t = torch.where(asked >= 1.0, t, torch.inf)
    return t if isinstance(degrees, Tensor) else t.item()
