"""Which timesteps are trained: densities of t, and the sampler that draws from them."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from torchtitan.diffusion import philox


class Density(Protocol):
    """A probability density of t on (0, 1)."""

    def quantile(self, u: Tensor) -> Tensor:
        """Inverse distribution function; u and the result are float64 in (0, 1)."""

    def log_sigma_density(self, log_sigma: Tensor) -> Tensor:
        """Density of ln sigma = logit t at the given values."""


@dataclass(frozen=True)
class Uniform:
    """t ~ U(0, 1), which is ln sigma ~ Logistic(0, 1)."""

    def quantile(self, u: Tensor) -> Tensor:
        return u

    def log_sigma_density(self, log_sigma: Tensor) -> Tensor:
        return torch.sigmoid(log_sigma) * torch.sigmoid(-log_sigma)


@dataclass(frozen=True)
class LogitNormal:
    """logit t = ln sigma ~ N(mean, std^2). Source: Esser et al., arXiv 2403.03206, eq. 19.

    The same density as EDM's ln sigma ~ N(P_mean, P_std^2) with mean = P_mean and std = P_std.
    """

    mean: float = 0.0
    std: float = 1.0

    def quantile(self, u: Tensor) -> Tensor:
        return torch.sigmoid(self.mean + self.std * torch.special.ndtri(u))

    def log_sigma_density(self, log_sigma: Tensor) -> Tensor:
        z = (log_sigma - self.mean) / self.std
        return torch.exp(-0.5 * z**2) / (self.std * (2.0 * torch.pi) ** 0.5)


@dataclass(frozen=True)
class GlobalBatch:
    """The samples of one optimizer step: numbers first_sample .. first_sample + size - 1."""

    first_sample: int
    size: int
    attempt: int = 0


class TimestepSampler:
    """Draws one timestep per sample, as a function of the seed and the sample's number only.

    With `stratified`, the global batch's samples fall into as many equal quantile intervals of the density, one
    each, in a random order fixed by the seed: the mean over a batch then has less variance, and every single
    draw still follows the density.
    """

    def __init__(self, density: Density, seed: int, stratified: bool = False) -> None:
        self.density = density
        self.seed = seed
        self.stratified = stratified

    def sample(self, batch: GlobalBatch, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Draw timesteps.

        Args:
            batch: the global batch that the samples belong to.
            indices: global sample numbers [B], int64, within the batch.

        Returns:
            t float32 [B] in [0, 1] and importance weights float32 [B] (1: the density is the objective's own).
        """
        u = philox.uniform(self.seed, "timestep", indices, batch.attempt)
        if self.stratified:
            u = (self._strata(batch, indices) + u) / batch.size
        t = self.density.quantile(u).to(torch.float32)
        return t, torch.ones_like(t)

    def _strata(self, batch: GlobalBatch, indices: Tensor) -> Tensor:
        members = torch.arange(batch.first_sample, batch.first_sample + batch.size, device=indices.device)
        order = philox.uniform(self.seed, "stratum", members, batch.attempt).argsort()
        stratum = torch.empty_like(order)
        stratum[order] = torch.arange(batch.size, device=indices.device)
        return stratum[indices - batch.first_sample]

    def state_dict(self) -> dict:
        """Nothing: every draw is a function of the sample's number."""
        return {}

    def load_state_dict(self, state: dict) -> None:
        if state:
            raise ValueError(f"this timestep sampler has no state, the checkpoint holds {sorted(state)}")
