"""Contract of densities of the training timestep t on (0, 1), in the common coordinate ln sigma = logit t."""

from typing import Protocol

from torch import Tensor


class Density(Protocol):
    """Density: a probability density of t on (0, 1)."""

    def quantile(self, u: Tensor) -> Tensor:
        """Inverse distribution function; u and the result are float64 in (0, 1)."""

    def log_sigma_density(self, log_sigma: Tensor) -> Tensor:
        """Density of ln sigma = logit t at the given values."""


class SmoothDensity(Density, Protocol):
    """Smooth density, from which others can be made."""

    def distribution(self, log_sigma: Tensor) -> Tensor:
        """Distribution function: probability of a smaller ln sigma, the inverse of quantile; float64."""
