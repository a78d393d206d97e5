"""Tails of the chi-squared and of Fisher's F distribution: p-values of goodness of fit."""

import math

_TINY = 1e-300
_TERMS = 10_000
_PRECISION = 1e-15


def chi_squared_tail(value: float, degrees: float) -> float:
    """Probability P(X > value) of chi-squared; value at least 0, degrees of freedom above 0."""
    import torch  # not needed by those who only read

    half = torch.tensor([degrees / 2, value / 2], dtype=torch.float64)
    return torch.special.gammaincc(half[0], half[1]).item()


def fisher_tail(value: float, above: float, below: float) -> float:
    """Probability P(F > value) of Fisher's F.

    Args:
        value: at least 0.
        above, below: degrees of freedom of the numerator and of the denominator, above 0.
    """
    if value <= 0:
        return 1.0
    share = below / (below + above * value)
    if share < (below + 2) / (above + below + 4):  # where the fraction converges fast
        return _beta(below / 2, above / 2, share)
    return 1.0 - _beta(above / 2, below / 2, 1.0 - share)


def _beta(a: float, b: float, x: float) -> float:
    """Regularised incomplete beta function I_x(a, b) by its continued fraction, by the modified method of Lentz.

    Source: DLMF, https://dlmf.nist.gov/8.17, eq. 8.17.22.
    """
    if x <= 0:
        return 0.0
    log_front = a * math.log(x) + b * math.log1p(-x) + math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    c, d = 1.0, 1.0 / (1.0 - (a + b) * x / (a + 1) or _TINY)
    fraction = d
    for m in range(1, _TERMS):
        for term in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1.0 / (1.0 + term * d or _TINY)
            c = 1.0 + term / c or _TINY
            fraction *= c * d
        if abs(c * d - 1.0) < _PRECISION:
            break
    return math.exp(log_front) * fraction / a
