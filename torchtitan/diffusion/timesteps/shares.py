"""Allocated timesteps: every bin gets a chosen share, with importance weights that keep the objective."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchtitan.device_tables import DeviceTables
from torchtitan.diffusion.timesteps.placement import Density
from torchtitan.diffusion.timesteps.sampler import GlobalBatch, TimestepSampler

_BISECTIONS = 64


class _Bins(NamedTuple):
    """Constants of K bins, known before any share.

    below: mass below each and below the end, float64 [K + 1].
    places: that below each again, its first and its last quantile, float64 [K, 3].
    ends: the last t below each, and its own last, float32 [K, 2].
    empty: whether it has no mass, bool [K].
    beyond: whether only bins without mass follow each, bool [K - 1], the last bin left out.
    only_t: t of each, float32 [K], where every bin with mass holds one timestep alone; else None.
    """

    below: Tensor
    places: Tensor
    ends: Tensor
    empty: Tensor
    beyond: Tensor
    only_t: Tensor | None

    def on(self, device: torch.device) -> "_Bins":
        tables: list[Any] = [table if table is None else table.to(device) for table in self]
        return _Bins(*tables)


class _Lookup(NamedTuple):
    """Lookup table for quantiles: ends of the shares, float64 [K - 1], begins, and masses / shares, float64 [K]."""

    inner: Tensor
    start: Tensor
    stretch: Tensor


class AllocatedTimesteps(TimestepSampler):
    """Sampler of a share q_b of the timesteps from bin b; within a bin it follows the objective's density.

    The quantile u of the ordinary sampler, whatever its spread, is mapped: bin b has the interval of length q_b instead
    of its mass pi_b. So a stratified batch holds each bin's share to within one sample on either side, and with shares
    equal to the masses, as at first, every timestep is the ordinary sampler's.

    The importance weight pi_b / q_b keeps mean loss and gradient those of the objective, as long as shares are set
    between steps, from earlier steps.

    Attributes:
        edges: inner edges in t, rising, float32 [K - 1]; bin k holds edges[k - 1] < t <= edges[k].
        masses: pi_b, probability of each bin under the density, float64 [K].
        shares: q_b, float64 [K].
    """

    _importance: DeviceTables | None  # of the shares, once it was asked for

    def __init__(self, density: Density, seed: int, spread: str = "none", *, edges: Tensor) -> None:
        """edges: inner edges in t, [K - 1]; equal ones enclose an empty bin. Raises ValueError: the edges fall."""
        super().__init__(density, seed, spread)
        self.edges = _checked_edges(edges)
        self._bins = _bins(density, self.edges)
        self.masses = _masses(self._bins.below)
        self._use(self.masses)

    def set_shares(self, shares: Sequence[float] | Tensor) -> None:
        """Set other shares from the next batch on.

        Args:
            shares: q_b, [K], summing to 1; positive in bins that have mass, 0 in others.

        Raises:
            ValueError: they are not.
        """
        shares = torch.as_tensor(shares, dtype=torch.float64).detach().to(self.masses.device)
        if shares.shape != self.masses.shape:
            raise ValueError(f"{shares.numel()} shares for {len(self.masses)} timestep bins")
        if not (((shares > 0) == (self.masses > 0)).all() and abs(shares.sum().item() - 1.0) <= 1e-9):
            masses = self.masses.tolist()
            raise ValueError(f"shares {shares.tolist()} must sum to 1 and be positive where the masses {masses} are")
        self._use(shares.clone())

    @property
    def of_sample_alone(self) -> bool:
        return False  # the shares change

    def sample(
        self, batch: GlobalBatch, indices: Tensor, drawn: Sequence[Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Draw timesteps: see TimestepSampler.sample. The importance is pi_b / q_b of the timestep's bin b."""
        u = self._quantiles(batch, indices, drawn)
        tables, lookup = self._tables_on(u.device)
        bins = torch.bucketize(u, lookup.inner)
        stretch = lookup.stretch.index_select(0, bins)
        importance = stretch.to(torch.float32)
        if tables.only_t is not None:
            return tables.only_t.index_select(0, bins), importance
        start = lookup.start.index_select(0, bins)
        below, first, last = tables.places.index_select(0, bins).unbind(1)
        v = u + (below - start) + (u - start) * (stretch - 1.0)  # u itself where shares are masses
        # Rounding may have led out of the bin.
        t = self.density.quantile(torch.minimum(torch.maximum(v, first), last)).to(torch.float32)
        above, end = tables.ends.index_select(0, bins).unbind(1)
        return torch.minimum(torch.maximum(t, above), end), importance

    def bin_importance(self, device: torch.device | None = None) -> Tensor:
        if self._importance is None:
            self._importance = DeviceTables(torch.where(self.shares > 0, self.masses / self.shares, 1.0))
        return self._importance.on(device or self.shares.device)[0]

    def state_dict(self) -> dict:
        """Return shares and edges as plain numbers, which JSON holds exactly."""
        return {"shares": self.shares.tolist(), "edges": self.edges.tolist()}

    def load_state_dict(self, state: dict) -> None:
        """Resume shares; the empty state of an ordinary sampler leaves them. Raises ValueError: other bins."""
        if not state:
            return
        if state["edges"] != self.edges.tolist():
            raise ValueError(f"the checkpoint's timestep bins have edges {state['edges']}, these {self.edges.tolist()}")
        self.set_shares(state["shares"])

    def _use(self, shares: Tensor) -> None:
        # No step here waits for the device, so that shares may change after every step.
        self.shares = shares
        self._importance = None
        running = torch.cat((shares.new_zeros(1), _running_sums(shares)))
        start = torch.where((shares == self.masses).all(), self._bins.below, running)
        # What rounding leaves beyond the last share belongs to it.
        inner = start[1:-1].masked_fill(self._bins.beyond, torch.inf)
        stretch = (self.masses / shares).masked_fill_(self._bins.empty, 1.0)
        self._tables = {shares.device: (self._bins, _Lookup(inner, start[:-1], stretch))}

    def _tables_on(self, device: torch.device) -> tuple[_Bins, _Lookup]:
        if device not in self._tables:
            lookup = self._tables[self.shares.device][1]
            self._tables[device] = (self._bins.on(device), _Lookup(*(table.to(device) for table in lookup)))
        return self._tables[device]


def bin_masses(density: Density, edges: Tensor) -> Tensor:
    """Probability of each bin under a density, float64 [K], of timesteps as they are sampled: rounded to float32.

    Found from quantiles alone, so that an index on an edge, to which many quantiles belong, counts whole, and in the
    bin in which `torch.bucketize(t, edges)` finds it.

    Args:
        edges: inner edges in t, rising, [K - 1]; bin k holds edges[k - 1] < t <= edges[k].

    Raises:
        ValueError: the edges fall.
    """
    return _masses(bin_quantiles(density, _checked_edges(edges))[0])


def bin_means(density: Density, edges: Tensor, function: Callable[[Tensor], Tensor], points: int = 1024) -> Tensor:
    """Mean of a function of t over each bin under a density, float64 [K]; NaN in an empty bin.

    Args:
        function: of timesteps, float32 [N] to [N]; a loss multiplier, for one.
        points: quantiles per bin, at the middles of equal parts.
    """
    below, first, last = bin_quantiles(density, _checked_edges(edges))
    masses = _masses(below)
    middles = (torch.arange(points, dtype=torch.float64) + 0.5) / points
    v = below[:-1, None] + masses[:, None] * middles
    t = density.quantile(torch.minimum(torch.maximum(v, first[:, None]), last[:, None])).to(torch.float32)
    means = function(t.flatten()).to(torch.float64).view(t.shape).mean(1)
    return torch.where(masses > 0, means, torch.nan)


def _checked_edges(edges: Tensor) -> Tensor:
    edges = edges.detach().to("cpu", torch.float32)
    if not (edges.diff() >= 0).all():
        raise ValueError(f"edges of timestep bins must rise: {edges.tolist()}")
    return edges


def _running_sums(values: Tensor) -> Tensor:
    """Running sums of the first 1 .. K values, [K]; deterministic on a GPU too, unlike `cumsum`."""
    if values.device.type == "cpu":
        return values.cumsum(0)
    return values.expand(len(values), -1).tril().sum(1)


def _masses(below: Tensor) -> Tensor:
    return below.diff()


def _bins(density: Density, edges: Tensor) -> _Bins:
    below, first, last = bin_quantiles(density, edges)
    empty = _masses(below) == 0
    zero, one = edges.new_zeros(1), edges.new_ones(1)
    ends = torch.stack((torch.cat((zero, torch.nextafter(edges, one))), torch.cat((edges, one))), dim=1)
    first_t, last_t = (density.quantile(ends_of_bins).to(torch.float32) for ends_of_bins in (first, last))
    only_t = first_t if ((first_t == last_t) | empty).all() else None
    follows = (~empty).flip(0).cumsum(0).flip(0)  # bins with mass, from each on
    return _Bins(below, torch.stack((below[:-1], first, last), dim=1), ends, empty, follows[1:] == 0, only_t)


def bin_quantiles(density: Density, edges: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mass below each bin and below the end, [K + 1]; first and last quantile whose t is in each bin, [K]; float64.

    Computed from quantiles alone, so that t, where it moves in steps, is binned as it will be when sampled.

    Args:
        edges: inner edges in t, float32, rising, [K - 1].
    """
    # By halving: `low` is the last quantile whose t is at most the edge, and `high` the next one.
    low, high = (torch.full(edges.shape, end, dtype=torch.float64) for end in (0.0, 1.0))
    for _ in range(_BISECTIONS):
        middle = 0.5 * (low + high)
        above = density.quantile(middle).to(torch.float32) > edges
        low, high = torch.where(above, low, middle), torch.where(above, middle, high)
    zero, one = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    below = torch.cat((zero, torch.where(low > 0, high, 0.0), one))
    # No sampler's quantile is 0 or 1, where a density without bounds has none.
    return below, torch.cat((zero + 2.0**-53, high)), torch.cat((low, one - 2.0**-53))
