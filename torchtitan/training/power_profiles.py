"""Profiles of power-function averages, and the combination of stored ones that comes nearest to another.

An average whose profile is tau^gamma on (0, t] is a point in a space of functions of time: a weighted sum of averages has
the weighted sum of their profiles. So an average of any length can be put together after training from stored ones.

Source: Karras et al., "Analyzing and Improving the Training Dynamics of Diffusion Models", section 3.2 and appendix C.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from torchtitan.training.ema import power_exponent

# Standard deviation of the widest profile, which weights all of training alike; relative to the time trained.
WIDEST_STD = 12**-0.5


@dataclass(frozen=True)
class Profile:
    """Profile of an average: training time of its last update, and standard deviation relative to that time.

    Attributes:
        time: > 0, in any unit that all profiles of one combination have.
        std: in (0, 12^-1/2), `ema.tracks.sigma_rel`.
    """

    time: float
    std: float

    @cached_property
    def exponent(self) -> float:
        return power_exponent(self.std)


@dataclass(frozen=True)
class Combination:
    """Coefficients (sum 1) of stored averages nearest to a profile; error: relative L2 norm of the difference."""

    coefficients: tuple[float, ...]
    error: float

    @property
    def magnitude(self) -> float:
        """Sum of the coefficients' magnitudes: factor by which rounding errors of the stored values may grow."""
        return float(np.abs(self.coefficients).sum())


def inner_products(rows: Sequence[Profile], columns: Sequence[Profile]) -> np.ndarray:
    """Inner products of profiles, integrals of their products over time: [R, C], float64."""
    time_a, gamma_a = (np.array([getattr(p, key) for p in rows])[:, None] for key in ("time", "exponent"))
    time_b, gamma_b = (np.array([getattr(p, key) for p in columns])[None, :] for key in ("time", "exponent"))
    # The earlier time over the later one, to the exponent of the later profile: it is cut off at the earlier time.
    ratio = np.minimum(time_a, time_b) / np.maximum(time_a, time_b)
    power = np.where(time_a < time_b, gamma_b, gamma_a)
    scale = (gamma_a + 1.0) * (gamma_b + 1.0) / (gamma_a + gamma_b + 1.0)
    return scale * ratio**power / np.maximum(time_a, time_b)


def combine(stored: Sequence[Profile], wanted: Profile) -> Combination:
    """Combine stored averages to the profile nearest to a wanted one, by least squares.

    Args:
        stored: at least one, no two alike.
        wanted: at a time of the stored ones; one of them is given back as it is.
    """
    return combinations(stored, [wanted])[0]


def combinations(stored: Sequence[Profile], wanted: Sequence[Profile]) -> list[Combination]:
    """Combinations for several wanted profiles, by one factorisation; see `combine`."""
    products = inner_products(stored, stored)  # [N, N]
    with_wanted = inner_products(stored, wanted)  # [N, W]
    solved = np.linalg.solve(products, with_wanted)
    found = []
    for column, profile in enumerate(wanted):
        if profile in stored:
            coefficients = np.array([float(each == profile) for each in stored])
            found.append(Combination(tuple(coefficients.tolist()), 0.0))
            continue
        coefficients = solved[:, column] / solved[:, column].sum()
        norm = float(inner_products([profile], [profile])[0, 0])
        gap = norm - 2.0 * coefficients @ with_wanted[:, column] + coefficients @ products @ coefficients
        found.append(Combination(tuple(coefficients.tolist()), float(np.sqrt(max(gap, 0.0) / norm))))
    return found
