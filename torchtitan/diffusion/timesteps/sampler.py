"""Sampler of training timesteps: one per sample, drawn from a density."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchtitan import philox
from torchtitan.diffusion.paths import Path
from torchtitan.diffusion.timesteps.contract import Density, SmoothDensity
from torchtitan.diffusion.timesteps.placement import Placement
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
            (places,) = drawn
            return philox.middles(places)
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
        """Density of t, before it is shifted and cut to the path.

        Raises:
            ValueError: it is not possible on this path.
        """
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
