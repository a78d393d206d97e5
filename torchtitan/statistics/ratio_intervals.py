"""Confidence interval of a ratio with a denominator that may be close to zero."""

import torch
from torch import Tensor


def fieller(
    numerator: Tensor, denominator: Tensor, var_n: Tensor, var_d: Tensor, covariance: Tensor, quantile: Tensor | float
) -> tuple[Tensor, Tensor, Tensor]:
    """Fieller's confidence set {r: (n - r d)^2 <= q^2 (var_n - 2 r cov + r^2 var_d)} of the ratio of two means.

    It does not linearise the ratio, so it holds for a denominator near zero. The true denominator is taken to be
    non-negative, as |G|^2 is: an estimate below zero counts as zero.

    Args:
        numerator, denominator: estimates n and d, float64 of any shape; jointly about normal.
        quantile: q, of Student's t or the normal distribution.

    Returns:
        lower, upper and unbounded, of the same shape. Unbounded, d <= q sqrt(var_d), means that the denominator is not
        significantly above zero: upper is then infinite, and only lower is known, which is -infinity where the numerator is
        not significantly positive either or where a variance is not finite.

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
