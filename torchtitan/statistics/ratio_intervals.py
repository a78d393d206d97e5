"""Confidence intervals of a ratio whose denominator may be close to zero."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

Ends = tuple[Tensor, Tensor, Tensor]


def _floats_for_floats(function: Callable[..., Ends]) -> Callable[..., tuple[Any, Any, Any]]:
    """Wrap a function of float64 tensors to take floats too, and to return floats for floats."""

    @wraps(function)
    def wrapped(*values: Tensor | float) -> tuple[Any, Any, Any]:
        results = function(*(torch.as_tensor(value, dtype=torch.float64) for value in values))
        if any(isinstance(value, Tensor) for value in values):
            return results
        lower, upper, unbounded = (result.item() for result in results)
        return lower, upper, unbounded

    return wrapped


@_floats_for_floats
def fieller(
    numerator: Tensor, denominator: Tensor, var_n: Tensor, var_d: Tensor, covariance: Tensor, quantile: Tensor
) -> Ends:
    """Fieller's confidence set {r: (n - r d)^2 <= q^2 (var_n - 2 r cov + r^2 var_d)} of the ratio of two means.

    It does not linearise the ratio, so it holds for a denominator near zero. The true denominator is taken to be
    non-negative, as |G|^2 is: an estimate below zero counts as zero.

    Args:
        numerator, denominator: estimates n and d, any shape; jointly about normal.
        quantile: q, of Student's t or the normal distribution.

    Returns:
        lower, upper and unbounded, of the same shape, or floats for floats. Unbounded, d <= q sqrt(var_d), means that
        the denominator is not significantly above zero: upper is then infinite, and only lower is known, which is
        -infinity where the numerator is not significantly positive either or where a variance is not finite.

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
) -> Ends:
    """Log-delta interval exp(log(n / d) +- q sigma) of a positive ratio, sigma the linearised standard error of the
    log.

    Args, Returns: as in `fieller`. Unbounded by the same rule; then lower is 0.
    """
    unbounded = ~(denominator > quantile * var_d.sqrt()) | ~(numerator > 0)
    ratio = numerator / denominator
    variance = var_n / numerator**2 - 2.0 * covariance / (numerator * denominator) + var_d / denominator**2
    factor = torch.exp(quantile * variance.clamp_min(0.0).sqrt())
    unbounded = unbounded | ~factor.isfinite()
    return torch.where(unbounded, 0.0, ratio / factor), torch.where(unbounded, torch.inf, ratio * factor), unbounded
