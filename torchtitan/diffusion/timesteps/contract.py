"""What a density of the training timestep t on (0, 1) offers, in the common coordinate ln sigma = logit t."""

from typing import Protocol

from torch import Tensor


class Density(Protocol):
    """A probability density of t on (0, 1)."""

    def quantile(self, u: Tensor) -> Tensor:
        """Inverse distribution function; u and the result are float64 in (0, 1)."""

    def log_sigma_density(self, log_sigma: Tensor) -> Tensor:
        """Density of ln sigma = logit t at the given values."""


class SmoothDensity(Density, Protocol):
    """A density that others can be made of."""

    def distribution(self, log_sigma: Tensor) -> Tensor:
        """Probability of a smaller ln sigma: what quantile inverts; float64."""
