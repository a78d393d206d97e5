"""Bins of timesteps for comparing trained models, and their representative timesteps."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from research.timestep_errors import TimestepNodes
from torchtitan.diffusion.objective import Objective
from torchtitan.diffusion.paths import has_indices
from torchtitan.diffusion.timesteps.sampler import uniform_density
from torchtitan.diffusion.timesteps.slot_edges import read_slot_edges, slot_positions, slot_unit

# Xie and Agam, arXiv 2502.01990, Table 1; its last slot ends at index 1000 there, and there is none.
PUBLISHED_EDGES = (0, 5, 13, 23, 37, 56, 82, 120, 177, 277, 1000)


@dataclass(frozen=True)
class TimestepBin:
    """Bin of timesteps.

    Attributes:
        low, high: its edges, high excluded; indices on a DDPM path, else t.
        unit: "index" or "t".
        share: probability of the bin under the reference density, uniform over indices or t.
        nodes: timesteps inside of it, in the middle of parts of equal width.
    """

    low: float
    high: float
    unit: str
    share: float
    nodes: TimestepNodes

    @property
    def label(self) -> str:
        """Label: its timesteps; whole indices with the last one included."""
        return f"{self.low:g}-{self.high - 1:g}" if self.unit == "index" else f"{self.low:.3g}-{self.high:.3g}"


def timestep_bins(objective: Objective, nodes_per_bin: int, edges_file: Path | None = None) -> list[TimestepBin]:
    """Cut an objective's path into bins, rising from data to noise.

    Args:
        objective: of the path.
        nodes_per_bin: timesteps in each; fewer where a bin has fewer indices.
        edges_file: as for `objective.timesteps.edges_path`; default: the published slots on a DDPM path of 1000
            indices, else ten bins of equal width in index or t.

    Raises:
        ValueError: the file is no such file, or its edges do not fit the path.
    """
    path = objective.path
    unit = slot_unit(path)
    edges = read_slot_edges(edges_file, unit) if edges_file else _default_edges(path)
    slot_positions(edges, path, uniform_density(path))
    # The end of a path is not the end of t where sigma is bounded.
    end = float(path.num_indices) if path.num_indices else min(path.t_max, 1.0)
    cut = [min(edge, end) for edge in edges]
    bins = []
    for low, high in itertools.pairwise(cut):
        if high > low:
            bins.append(TimestepBin(low, high, unit, (high - low) / end, _nodes(objective, low, high, nodes_per_bin)))
    return bins


def _default_edges(path) -> Sequence[float]:
    if path.num_indices:
        count = path.num_indices
        return PUBLISHED_EDGES if count == PUBLISHED_EDGES[-1] else [round(count * k / 10) for k in range(11)]
    return [k / 10 for k in range(11)]


def _nodes(objective: Objective, low: float, high: float, count: int) -> TimestepNodes:
    path = objective.path
    if not has_indices(path):
        return TimestepNodes(low + (high - low) * (torch.arange(count, dtype=torch.float64) + 0.5) / count)
    if path.discrete:
        count = min(count, round(high - low))
    middle = low + (high - low) * (torch.arange(count, dtype=torch.float64) + 0.5) / count
    if path.discrete:
        index = middle.floor().long()
        return TimestepNodes(path.index_to_t(index), index)
    return TimestepNodes(path.index_to_t(middle.clamp(max=path.num_indices - 1)))
