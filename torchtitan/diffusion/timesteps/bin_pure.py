"""Timesteps of microbatches that each hold one bin, so that gradients can be separated by bin."""

from collections.abc import Sequence

import torch
from torch import Tensor

from torchtitan import philox
from torchtitan.device_tables import DeviceTables
from torchtitan.diffusion.timesteps.placement import Density
from torchtitan.diffusion.timesteps.sampler import GlobalBatch, TimestepSampler
from torchtitan.diffusion.timesteps.shares import bin_quantiles

# Below this share of the density a bin's importance is noise, and float64 quantiles begin to run out of places.
_SMALLEST_MASS = 1e-9


class BinPureTimesteps(TimestepSampler):
    """Sampler of a microbatch's timesteps, over all ranks, from the density within one bin.

    The microbatches of a run are numbered through, and K of them in a row visit the K bins once each, in an order
    drawn anew for every K. So every microbatch is equally likely to be of any bin, known before sampling, and with the
    importance mass_k K the mean loss is that of the density.

    Samples of one microbatch are independent: one rank's are distributed as another's.

    Attributes:
        edges: inner edges in t, rising, float32 [K - 1]; bin k holds edges[k - 1] < t <= edges[k].
        masses: probability of each bin under the density, float64 [K].
    """

    def __init__(
        self, density: Density, seed: int, spread: str = "none", *, edges: Tensor, microbatches_per_step: int
    ) -> None:
        """Cut a density into bins.

        Args:
            seed: of the order of bins and of the draws.
            spread: "none"; every other one relates the samples of different ranks.
            edges: inner edges in t, rising, float64 [K - 1].
            microbatches_per_step: equal parts M of every global batch; sample i of B is in part floor(i M / B).

        Raises:
            ValueError: a spread, edges that do not rise in float32, or a bin without mass.
        """
        if spread != "none":
            raise ValueError(f"objective.spread = {spread}: must be none, so that the ranks' samples are independent")
        super().__init__(density, seed, spread)
        self.edges = edges.to("cpu", torch.float32)
        self._microbatches = microbatches_per_step
        below, first, last = bin_quantiles(density, self.edges)
        self.masses = below.diff()
        self._importance = DeviceTables(self.masses * len(self.masses))
        self._bins = DeviceTables(torch.stack((below[:-1], self.masses, first, last), dim=1))
        if (self.edges.diff() <= 0).any() or (self.masses < _SMALLEST_MASS).any():
            masses = [f"{mass:.2g}" for mass in self.masses.tolist()]
            raise ValueError(f"bins with edges {self.edges.tolist()} hold {masses} of the timesteps: each needs some")

    def bin_importance(self, device: torch.device | None = None) -> Tensor:
        return self._importance.on(device or self.masses.device)[0]

    def bin_of_microbatch(self, batch: GlobalBatch, microbatch: int) -> int:
        """Bin of a microbatch, 0 <= microbatch < M, of a global batch, on every rank."""
        return int(self._bins_of_step(batch, torch.device("cpu"))[microbatch])

    @property
    def of_sample_alone(self) -> bool:
        return False  # the bin is the microbatch's

    def sample(
        self, batch: GlobalBatch, indices: Tensor, drawn: Sequence[Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Draw timesteps: see TimestepSampler.sample. The importance is mass_k K of the microbatch's bin k."""
        microbatch = (indices - batch.first_sample) * self._microbatches // batch.size  # [B]
        bins = self._bins_of_step(batch, indices.device)[microbatch]
        (tables,) = self._bins.on(indices.device)
        below, masses, first, last = tables.index_select(0, bins).unbind(1)
        u = below + masses * self._quantiles(batch, indices, drawn)
        # The sum may be rounded out of the bin.
        t = self.density.quantile(torch.minimum(torch.maximum(u, first), last)).to(torch.float32)
        return t, (masses * len(self.masses)).to(torch.float32)

    def _bins_of_step(self, batch: GlobalBatch, device: torch.device) -> Tensor:
        """Bin of each microbatch of a step, [M]."""
        bins = len(self.masses)
        step = batch.first_sample // batch.size
        number = step * self._microbatches + torch.arange(self._microbatches, device=device)  # over the whole run
        members = (number // bins)[:, None] * bins + torch.arange(bins, device=device)  # [M, K], a visit of all bins
        # The attempt is left out: bins continue in turn when a step is repeated.
        order = philox.uniform(self.seed, "bin_order", members.flatten()).view(-1, bins).argsort(dim=1)
        return order.gather(1, (number % bins)[:, None]).squeeze(1)
