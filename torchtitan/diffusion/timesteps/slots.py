"""Slots of timesteps that are drawn equally often."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path as FilePath

import torch

from torchtitan.diffusion.paths import Path
from torchtitan.diffusion.timesteps.placement import Placement, SmoothDensity
from torchtitan.diffusion.timesteps.sampler import TimestepSampler, TimestepsConfig, uniform_density
from torchtitan.diffusion.timesteps.shares import AllocatedTimesteps, bin_masses
from torchtitan.diffusion.timesteps.slot_edges import read_slot_edges, slot_positions, slot_unit
from torchtitan.diffusion.timesteps.warps import Steps, Warped
from torchtitan.settings import setting


@dataclass(kw_only=True)
class SlotsConfig(TimestepsConfig):
    """Slots that are drawn equally often, and within each uniform timesteps."""

    edges: list[float] = setting([], "edges of the slots, from 0 to 1 in t, on a DDPM path to the number of indices")
    edges_path: str = setting("", "file of slot edges, instead of edges", path=True)
    importance: bool = setting(False, "weigh samples so that the mean loss stays that of uniform timesteps")

    def density(self, path: Path) -> SmoothDensity:
        uniform = uniform_density(path)
        positions = slot_positions(self._given_edges(path), path, uniform)
        return Warped(uniform, Steps(positions, [1.0] * (len(positions) - 1)))

    def sampler(self, placement: Placement, seed: int, spread: str) -> TimestepSampler:
        density = self.density(placement.path)
        drawn = placement.on_path(density)
        if not self.importance:
            return TimestepSampler(drawn, seed, spread)
        slots = len(self._given_edges(placement.path)) - 1
        # All slots have the same mass, before any cut.
        quantiles = torch.arange(1, slots, dtype=torch.float64) / slots
        edges = placement.shifted(density).quantile(quantiles).to(torch.float32)
        sampler = AllocatedTimesteps(placement.on_path(uniform_density(placement.path)), seed, spread, edges=edges)
        sampler.set_shares(bin_masses(drawn, edges))
        return sampler

    def problems(self, path: Path, path_name: str) -> Iterator[tuple[str, str]]:
        if self.edges and self.edges_path:
            yield "edges_path", "objective.timesteps.edges is given too (remove one of them)"
            return
        if not (self.edges or self.edges_path):
            end = f"{path.num_indices}, in indices" if path.num_indices else "1, in t"
            yield "name", (
                f"slots needs objective.timesteps.edges, rising from 0 to {end} (or objective.timesteps.edges_path, a file"
                " of them)"
            )
            return
        try:
            self.density(path)
        except ValueError as problem:
            yield "edges_path" if self.edges_path else "edges", str(problem)

    def resolved(self, path: Path) -> "SlotsConfig":
        """Resolve the section: read the edges of its file, so that the run's own record does not depend on the file."""
        return dataclasses.replace(self, edges=self._given_edges(path), edges_path="")

    def _given_edges(self, path: Path) -> list[float]:
        return read_slot_edges(FilePath(self.edges_path), slot_unit(path)) if self.edges_path else self.edges
