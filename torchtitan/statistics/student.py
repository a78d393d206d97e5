"""Student's t distribution."""

import math
from functools import cache
from typing import TYPE_CHECKING, overload

if TYPE_CHECKING:
    from torch import Tensor

_INTERVALS = 512  # of Simpson's rule
_NEWTON_STEPS = 40  # at most
_CONVERGED = 1e-9  # relative; the error after such a step is of the order of its square
_NEGLIGIBLE = 41.0  # -ln of the density's share beyond which it does not count


@overload
def student_quantile(probability: float, degrees: float) -> float: ...


@overload
def student_quantile(probability: float, degrees: "Tensor") -> "Tensor": ...


def student_quantile(probability: float, degrees: "float | Tensor") -> "float | Tensor":
    """Quantile of Student's t for any degrees of freedom, also fractional ones; relative error below 1e-8.

    Args:
        probability: 0.5 < probability <= 0.9995.
        degrees: of freedom, any shape; above 10^6 counted as that.

    Returns:
        t, of the same shape, or a float for a float; infinity below one degree of freedom, where it is useless.
    """
    return _of_float(probability, degrees) if isinstance(degrees, int | float) else _of_tensor(probability, degrees)


def student_two_sided(t: float, degrees: float) -> float:
    """Two-sided p-value P(|T| >= |t|) of Student's t; absolute error below 1e-9.

    Args:
        t: statistic, finite or infinite.
        degrees: of freedom, at least 1, also fractional; above 10^6 counted as that.
    """
    nu = min(degrees, 1e6)
    # As in _of_tensor; where the density is negligible it is not integrated.
    end = min(math.asinh(abs(t) / math.sqrt(nu)), math.acosh(math.exp(_NEGLIGIBLE / nu)))
    weights = (1 if k in (0, _INTERVALS) else 4 if k % 2 else 2 for k in range(_INTERVALS + 1))
    area = sum(w * math.cosh(end * k / _INTERVALS) ** -nu for k, w in enumerate(weights)) * end / (3 * _INTERVALS)
    scale = math.exp(math.lgamma(0.5 * (nu + 1)) - math.lgamma(0.5 * nu)) / math.sqrt(math.pi)
    return min(max(1.0 - 2.0 * scale * area, 0.0), 1.0)


@cache
def _of_float(probability: float, degrees: float) -> float:
    import torch  # not needed by those who read runs without repeats

    return _of_tensor(probability, torch.tensor(degrees, dtype=torch.float64)).item()


def _of_tensor(probability: float, degrees: "Tensor") -> "Tensor":
    """Integrate the density by Simpson's rule in v, t = sqrt(degrees) sinh(v), where it is proportional to
    cosh(v)^-degrees, and invert by Newton's method, which rises to the solution from the normal quantile."""
    import torch

    asked = degrees.to(torch.float64)
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
        step = (probability - 0.5 - area) / density
        t = t + step
        if not (step.abs() > _CONVERGED * t).any():  # quadratic: what is left is rounding
            break
    return torch.where(asked >= 1.0, t, torch.inf)
