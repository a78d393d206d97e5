"""Sampler of training timesteps: one per sample, drawn from a density; and the densities, each with its keys."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchtitan import philox
from torchtitan.diffusion.paths import IndexedPath, Path, has_indices
from torchtitan.diffusion.timesteps.placement import Density, Placement, SmoothDensity
from torchtitan.settings import setting


@dataclass(frozen=True)
class GlobalBatch:
    """Global batch: the samples of one optimizer step, numbers first_sample .. first_sample + size - 1."""

    first_sample: int
    size: int
    attempt: int = 0


class TimestepSampler:
    """Timestep sampler: one timestep per sample, as a function of the seed and the sample's number only.

    `spread` says how the draws of one global batch of B samples relate; every single one follows the density.

    - none: independent.
    - stratified: one in each of B equal quantile intervals of the density, at a separate place in each.
    - low_discrepancy: the same with one common place, the quantiles (u + i / B) mod 1 with one u for the batch.
      Source: Kingma et al., "Variational diffusion models", arXiv 2107.00630, appendix I.1.

    Samples get intervals in a random order fixed by the seed. A mean over a batch then has less variance.
    """

    def __init__(self, density: Density, seed: int, spread: str = "none") -> None:
        self.density = density
        self.seed = seed
        self.spread = spread

    @property
    def of_sample_alone(self) -> bool:
        """True if a timestep is a function of its sample's number and the attempt, whatever the batch and earlier losses."""
        return self.spread == "none"

    def draws(self, batch: GlobalBatch, indices: Tensor) -> tuple[tuple[str, Tensor], ...]:
        """Uniform draws that timesteps are made of: purpose and sample numbers of each, for `philox.uniform_bits`."""
        if self.spread == "none":
            return (("timestep", indices),)
        members = torch.arange(batch.first_sample, batch.first_sample + batch.size, device=indices.device)
        return (("timestep", members[:1] if self.spread == "low_discrepancy" else indices), ("stratum", members))

    def sample(
        self, batch: GlobalBatch, indices: Tensor, drawn: Sequence[Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Draw timesteps.

        Args:
            batch: the global batch that the samples belong to.
            indices: global sample numbers [B], int64, within the batch.
            drawn: bits of `draws`, drawn together with others; None: drawn here.

        Returns:
            t float32 [B] in [0, 1] and importance weights float32 [B] (1: the density is the objective's own).
        """
        t = self.density.quantile(self._quantiles(batch, indices, drawn)).to(torch.float32)
        return t, torch.ones_like(t)

    def _quantiles(self, batch: GlobalBatch, indices: Tensor, drawn: Sequence[Tensor] | None = None) -> Tensor:
        if drawn is None:
            drawn = philox.uniform_bits(self.seed, self.draws(batch, indices), batch.attempt)
        if self.spread == "none":
            return philox.middles(drawn[0])
        common = self.spread == "low_discrepancy"
        places, order = drawn
        strata = _ranks(order).index_select(0, indices - batch.first_sample)
        if not common:
            return (strata + philox.middles(places)) / batch.size
        # Never exactly 0, where a density without bounds has no quantile.
        return ((philox.middles(places) + strata.to(torch.float64) / batch.size) % 1.0).clamp_min(2.0**-53)

    def bin_importance(self, device: torch.device | None = None) -> Tensor | None:
        """Importance weight shared by all samples of a bin, float64 [K]; None if no sample carries any.

        device: where it is wanted; None: where the sampler keeps it.
        """
        return None

    def bin_of_microbatch(self, batch: GlobalBatch, microbatch: int) -> int | None:
        """Bin of all samples of a microbatch, on every rank; None if they may be of any."""
        return None

    def observe(self, batch: GlobalBatch, indices: Tensor, t: Tensor, loss: Tensor) -> None:
        """Observe the losses of a microbatch, [B], with their importance; ignored here."""

    def update(self, skip: Tensor) -> None:
        """Update after the backward of a whole global batch: learn from the observed losses, unless `skip`; collective.
        """

    def state_dict(self) -> dict:
        """Return an empty state: every draw is a function of the sample's number."""
        return {}

    def load_state_dict(self, state: dict) -> None:
        if state:
            raise ValueError(f"this timestep sampler has no state, the checkpoint holds {sorted(state)}")


@dataclass(kw_only=True)
class TimestepsConfig:
    """`[objective.timesteps]`: base of the keys of every density, and of every sampler that changes one.

    A name below without a type is no key.

    Attributes:
        light_tailed: whether the density falls faster towards both ends than every weight grows.
        learns: whether draws depend on the losses of the run.
    """

    name: str = setting("", "density of the training timesteps, or sampler that changes one as it learns from losses")

    light_tailed = False
    learns = False

    def density(self, path: Path) -> SmoothDensity:
        """Density of t before its shift and cut to the path. Raises ValueError: impossible on this path."""
        raise NotImplementedError

    def sampler(self, placement: Placement, seed: int, spread: str) -> TimestepSampler:
        """Sampler of the timesteps. Its `density` is the objective's, also for evaluation.

        Raises:
            ValueError: it is not possible on this path, or the density lies outside the times allowed.
        """
        return TimestepSampler(placement.on_path(self.density(placement.path)), seed, spread)

    def problems(self, path: Path, path_name: str) -> Iterator[tuple[str, str]]:
        """Problems of drawing timesteps on a path: pairs of a key of this section and the reason."""
        yield from ()

    def resolved(self, path: Path) -> "TimestepsConfig":
        """Resolve the section: write into it the values that come from elsewhere, as from a file. Raises ValueError."""
        return self


def _ranks(values: Tensor) -> Tensor:
    """Rank of each of the values, [N], all different."""
    return torch.empty_like(values).scatter_(0, values.argsort(), torch.arange(len(values), device=values.device))


@dataclass(frozen=True)
class Uniform:
    """t ~ U(0, 1), which is ln sigma ~ Logistic(0, 1)."""

    def quantile(self, u: Tensor) -> Tensor:
        return u

    def distribution(self, log_sigma: Tensor) -> Tensor:
        return torch.sigmoid(log_sigma)

    def log_sigma_density(self, log_sigma: Tensor) -> Tensor:
        return torch.sigmoid(log_sigma) * torch.sigmoid(-log_sigma)


@dataclass(kw_only=True)
class UniformConfig(TimestepsConfig):
    """Uniform over t, on a DDPM path over its indices."""

    def density(self, path: Path) -> SmoothDensity:
        return uniform_density(path)


@dataclass(frozen=True)
class LogitNormal:
    """logit t = ln sigma ~ N(mean, std^2). Source: Esser et al., arXiv 2403.03206, eq. 19.

    The same density as EDM's ln sigma ~ N(P_mean, P_std^2) with mean = P_mean and std = P_std.
    """

    mean: float = 0.0
    std: float = 1.0

    def quantile(self, u: Tensor) -> Tensor:
        return torch.sigmoid(self.mean + self.std * torch.special.ndtri(u))

    def distribution(self, log_sigma: Tensor) -> Tensor:
        return torch.special.ndtr((log_sigma - self.mean) / self.std)

    def log_sigma_density(self, log_sigma: Tensor) -> Tensor:
        z = (log_sigma - self.mean) / self.std
        return torch.exp(-0.5 * z**2) / (self.std * (2.0 * torch.pi) ** 0.5)


@dataclass(kw_only=True)
class LogitNormalConfig(TimestepsConfig):
    """Normal in logit(t)."""

    mean: float = setting(0.0, "mean of logit(t)")
    std: float = setting(1.0, "standard deviation of logit(t)", gt=0)

    light_tailed = True

    def density(self, path: Path) -> SmoothDensity:
        return LogitNormal(self.mean, self.std)


@dataclass(kw_only=True)
class LognormalSigmaConfig(TimestepsConfig):
    """Normal in ln(sigma): the same densities, with EDM's names and defaults."""

    p_mean: float = setting(-1.2, "mean of ln(sigma)")
    p_std: float = setting(1.2, "standard deviation of ln(sigma)", gt=0)

    light_tailed = True

    def density(self, path: Path) -> SmoothDensity:
        return LogitNormal(self.p_mean, self.p_std)


@dataclass(frozen=True)
class Mode:
    """t = 1 - u - scale (cos^2(pi u / 2) - 1 + u) of uniform u: heavy in the middle for a positive scale.

    -1 < scale < 2 / (pi - 2) = 1.7519. Source: Esser et al., arXiv 2403.03206, eq. 20. With 1 - u instead of u, so that
    t rises with u: t = u + scale (u - sin^2(pi u / 2)).
    """

    scale: float

    def quantile(self, u: Tensor) -> Tensor:
        return u + self.scale * (u - torch.sin(0.5 * torch.pi * u) ** 2)

    def distribution(self, log_sigma: Tensor) -> Tensor:
        t = torch.sigmoid(log_sigma)
        low, high = torch.zeros_like(t), torch.ones_like(t)
        for _ in range(60):  # halves an interval of 1 to below float64's resolution
            middle = 0.5 * (low + high)
            above = self.quantile(middle) > t
            low, high = torch.where(above, low, middle), torch.where(above, middle, high)
        return 0.5 * (low + high)

    def log_sigma_density(self, log_sigma: Tensor) -> Tensor:
        u = self.distribution(log_sigma)
        slope = 1.0 + self.scale * (1.0 - 0.5 * torch.pi * torch.sin(torch.pi * u))  # dt/du
        return torch.sigmoid(log_sigma) * torch.sigmoid(-log_sigma) / slope


@dataclass(kw_only=True)
class ModeConfig(TimestepsConfig):
    """Heavy in the middle, with neither end left out."""

    scale: float = setting(1.29, "weight of the middle; 0 is uniform", gt=-1, lt=1.75)

    def density(self, path: Path) -> SmoothDensity:
        return Mode(self.scale)


@dataclass(frozen=True)
class CosMap:
    """t = 1 - 1 / (tan(pi u / 2) + 1), that is sigma = tan(pi u / 2). Source: Esser et al., arXiv 2403.03206, eq. 21.

    On a variance-preserving path u is then linear in the angle between signal and noise.
    """

    def quantile(self, u: Tensor) -> Tensor:
        tangent = torch.tan(0.5 * torch.pi * u)
        return tangent / (1.0 + tangent)

    def distribution(self, log_sigma: Tensor) -> Tensor:
        return torch.atan(torch.exp(log_sigma)) / (0.5 * torch.pi)

    def log_sigma_density(self, log_sigma: Tensor) -> Tensor:
        return 1.0 / (torch.pi * torch.cosh(log_sigma))


@dataclass(kw_only=True)
class CosMapConfig(TimestepsConfig):
    """The cosine schedule's noise levels."""

    def density(self, path: Path) -> SmoothDensity:
        return CosMap()


@dataclass(frozen=True)
class Laplace:
    """ln snr = -2 ln sigma ~ Laplace(mean, scale), which is ln sigma ~ Laplace(-mean / 2, scale / 2).

    Source: Hang et al., "Improved noise schedule for diffusion training", arXiv 2407.03297.
    """

    mean: float = 0.0
    scale: float = 0.5

    def quantile(self, u: Tensor) -> Tensor:
        # Each half from its own end, so that neither tail is a difference of close numbers.
        distance = -torch.log(2.0 * torch.minimum(u, 1.0 - u))
        return torch.sigmoid(-0.5 * self.mean + 0.5 * self.scale * distance * torch.sign(u - 0.5))

    def distribution(self, log_sigma: Tensor) -> Tensor:
        z = (log_sigma + 0.5 * self.mean) / (0.5 * self.scale)
        tail = 0.5 * torch.exp(-z.abs())
        return torch.where(z < 0, tail, 1.0 - tail)

    def log_sigma_density(self, log_sigma: Tensor) -> Tensor:
        return torch.exp(-(log_sigma + 0.5 * self.mean).abs() / (0.5 * self.scale)) / self.scale


@dataclass(kw_only=True)
class LaplaceConfig(TimestepsConfig):
    """Laplace in ln(snr)."""

    mean: float = setting(0.0, "mean of ln(snr)")
    scale: float = setting(0.5, "mean distance of ln(snr) from its mean", ge=0.01, le=100)

    def density(self, path: Path) -> SmoothDensity:
        return Laplace(self.mean, self.scale)


class UniformIndex:
    """Uniform over a DDPM path's indices: real ones in [0, T - 1], or integers, each as the interval around it."""

    def __init__(self, path: IndexedPath) -> None:
        self.path = path
        margin = 0.5 if path.discrete else 0.0
        self.first, self.count = -margin, path.num_indices - 1 + 2 * margin

    def quantile(self, u: Tensor) -> Tensor:
        return self.path.index_to_t(self.first + self.count * u)

    def distribution(self, log_sigma: Tensor) -> Tensor:
        return ((self.path.log_sigma_to_index(log_sigma) - self.first) / self.count).clamp(0.0, 1.0)

    def log_sigma_density(self, log_sigma: Tensor) -> Tensor:
        index = self.path.log_sigma_to_index(log_sigma)
        below = index.floor().clamp(0, self.path.num_indices - 2)
        step = self.path.index_to_log_sigma(below + 1) - self.path.index_to_log_sigma(below)
        inside = (index >= self.first) & (index <= self.first + self.count)
        return inside / (step * self.count)


def uniform_density(path: Path) -> SmoothDensity:
    """Uniform over a path's indices; over t where it has none."""
    return UniformIndex(path) if has_indices(path) else Uniform()
