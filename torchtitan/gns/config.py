"""`[gns]`: its keys, the timestep bins that they describe, and sections that could not give a number, or not a right one."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchtitan.diffusion.objective import Objective, ObjectiveConfig
from torchtitan.diffusion.paths import PATHS
from torchtitan.diffusion.timesteps.placement import Density
from torchtitan.diffusion.timesteps.registry import build_density
from torchtitan.diffusion.timesteps.sampler import TimestepSampler
from torchtitan.errors import TrainingError
from torchtitan.pictures.number_text import counted
from torchtitan.settings import only_enabled, setting

# Folder in that of a run, and the picture in it.
GNS_FOLDER, PICTURE_FILE = "gns", "noise_scale.png"

# Advice where the taps cannot measure a network or an objective.
WITHOUT_TAPS = (
    "set gns.enable to false, or, with two or more processes or microbatches and objective.spread = none, gns.single_pass to"
    " false and gns.rank_gradients to true"
)

# Tags of the number of bins and of their inner edges.
_COUNT, _EDGE = "gns/bins", "gns/edges"

# Quantities of a bin that are drawn.
DRAWN = ("b_simple", "lower", "upper")

# Fewer samples of a bin in a step hold hardly a pair, and only pairs say anything of the mean gradient.
_LEAST_PER_BIN = 2

_TAPPED = {"single_pass": (True,)}
_BY_INTERVAL = {"single_pass or nuclear_norm": (True,)}
_BINNED = {"single_pass or bin_pure_microbatches": (True,)}


@only_enabled()
@dataclass(kw_only=True)
class GNSConfig:
    """`[gns]`: gradient noise scale per timestep bin, measured while training."""

    enable: bool = setting(False, "measure the gradient noise scale of every timestep bin", trajectory=False)
    interval: int = setting(
        8, "steps between measurements by sketches of all layers, or of the nuclear norm", ge=1, applies=_BY_INTERVAL,
        trajectory=False,
    )
    sketch_size: int = setting(
        6, "columns of a layer's random sketch over tokens: more of them, less error, more time",
        ge=1, le=32, applies=_TAPPED,
        trajectory=False,
    )
    adam_geometry: bool = setting(
        True, "measure in Adam's geometry too, in which timesteps are allocated, batches grow and samplers are compared; without "
        "it measuring takes about two thirds of the time on small models", applies=_TAPPED, trajectory=False,
    )
    num_bins: int = setting(
        10, "timestep bins of equal training mass, unless bin_edges is given", ge=1, le=64, applies=_BINNED,
        trajectory=False,
    )
    bin_edges: list[float] = setting(
        [], "edges of the bins in t, rising from 0 to 1", applies=_BINNED, trajectory=False
    )
    half_life: float = setting(
        32768.0, "longest half-life of a measurement, in samples trained of its bin; shorter where the noise scale drifts",
        gt=0, trajectory=False,
    )
    log_interval: int = setting(
        50, "steps between logged estimates; each tenth, and the last step, draws <run>/gns/noise_scale.png too", ge=1,
        trajectory=False,
    )
    single_pass: bool = setting(
        True, "estimate per bin from one ordinary backward, by taps on the layers", trajectory=False
    )
    rank_gradients: bool = setting(
        False, "compare each rank's gradient (or each microbatch's, in a single process) with the reduced one",
        trajectory=False,
    )
    bin_pure_microbatches: bool = setting(
        False, "one timestep bin per microbatch, each reduced separately: rank gradients then measure single bins",
        applies={"rank_gradients": (True,)},
    )
    nuclear_norm: bool = setting(
        False, "measure in the norm of Muon's step too, from the ranks' gradients of its matrices",
        applies={"rank_gradients": (True,)}, trajectory=False,
    )
    allocate_timesteps: bool = setting(
        False, "draw timesteps in proportion to each bin's measured noise; importance weights keep the objective",
        applies=_TAPPED,
    )
    allocation_warmup: int = setting(
        20_000, "images before the first change of the allocation", ge=0, applies={"allocate_timesteps": (True,)}
    )
    allocation_interval: int = setting(
        100, "minimum steps between changes of the allocation", ge=1,
        applies={"allocate_timesteps": (True,)},
    )


def inner_edges(config: GNSConfig, density: Density) -> Tensor:
    """Inner edges of the timestep bins in t, rising, float64 [K - 1].

    Raises:
        ValueError: edges that are not rising, do not cover the whole range, or enclose no training timestep.
    """
    if not config.bin_edges:
        return density.quantile(torch.arange(1, config.num_bins, dtype=torch.float64) / config.num_bins)
    edges = torch.tensor(config.bin_edges, dtype=torch.float64)
    if len(edges) < 2 or not (edges.diff() > 0).all():
        raise ValueError("must rise from one edge to the next, two edges at least")
    if edges[0] != 0 or edges[-1] != 1:
        raise ValueError("must begin at 0 and end at 1, or samples fall into no bin")
    return edges[1:-1]


def bin_edges(config: GNSConfig, objective: ObjectiveConfig) -> Tensor:
    """Inner edges of the bins of an objective's timesteps, as `inner_edges`."""
    return inner_edges(config, build_density(objective, PATHS[objective.path]()))


def bin_tags(edges: Sequence[float]) -> dict[str, float]:
    """Tags that say which bins, by inner edges in t, rising, a point's noise scales are of."""
    return {_COUNT: float(len(edges) + 1)} | {f"{_EDGE}/{k}": edge for k, edge in enumerate(edges)}


def is_drawn(tag: str) -> bool:
    """Check whether a logged value is drawn, or needed for it."""
    parts = tag.split("/")
    if len(parts) == 5 and parts[3] == "all":
        return parts[4] in (*DRAWN, "headline", "samples")
    of_a_bin = len(parts) == 5 and parts[0] == "gns" and parts[2] == "composite"
    return tag == _COUNT or tag.startswith(f"{_EDGE}/") or (of_a_bin and parts[4] in DRAWN)


def of_bins(point: Mapping[str, Any], edges: Sequence[float]) -> bool:
    """Check whether a point's noise scales are of these bins; True where it does not say, as formerly."""
    if _COUNT not in point:
        return True
    return point[_COUNT] == len(edges) + 1 and all(
        math.isclose(point.get(f"{_EDGE}/{k}", math.nan), edge, abs_tol=1e-6) for k, edge in enumerate(edges)
    )


def gns_problems(
    config: GNSConfig, objective: Objective, given: set[str], *, global_batch_size: int, microbatches: int, ranks: int
) -> Iterator[tuple[str, str]]:
    """Find what makes a measurement of this objective's timesteps impossible or wrong: (key of the section, reason)."""
    if type(objective.timestep_sampler) is not TimestepSampler:
        yield "enable", (
            "objective.timesteps has state or importance weights, which the measured bins do not account for"
            " (set it to false, or use another sampler)"
        )
        return
    yield from _rank_problems(config, objective, microbatches, ranks)
    if config.single_pass and objective.untrained_forwards:
        yield "single_pass", (
            f"objective.name = {objective.config.name} calls the network more than once for each sample ({WITHOUT_TAPS})"
        )
    if not config.single_pass and not config.rank_gradients:
        yield "single_pass", "without it and without gns.rank_gradients nothing is measured (set gns.enable to false)"
    if config.allocate_timesteps and config.bin_pure_microbatches:
        yield "allocate_timesteps", "microbatches of one bin each leave nothing to allocate (set one of the two to false)"
    # A run's recorded configuration gives every key, so that defaults must pass.
    if "gns.num_bins" in given and config.num_bins != GNSConfig.num_bins and config.bin_edges:
        yield "num_bins", "has no effect with gns.bin_edges (remove one of them)"
    density = objective.timestep_sampler.density
    try:
        edges = inner_edges(config, density)
    except ValueError as problem:
        yield "bin_edges", str(problem)
        return
    # The quantiles of a fine grid: a bin that none of them meets has hardly any mass.
    drawn = density.quantile((torch.arange(100_000, dtype=torch.float64) + 0.5) / 100_000)
    counts = torch.bincount(torch.bucketize(drawn.to(torch.float32), edges.to(torch.float32)), minlength=len(edges) + 1)
    if (empty := (counts == 0).nonzero().flatten().tolist()):
        key = "bin_edges" if config.bin_edges else "num_bins"
        yield key, f"no training timestep falls into bin {empty[0]} of 0 to {len(counts) - 1} (use fewer or wider bins)"
    if config.single_pass and global_batch_size < _LEAST_PER_BIN * len(counts):
        yield ("bin_edges" if config.bin_edges else "num_bins"), (
            f"{counted(len(counts), 'bin')} {'share' if len(counts) > 1 else 'shares'}"
            f" {counted(global_batch_size, 'image')} per step: a bin needs {_LEAST_PER_BIN} or"
            f" more, for only pairs tell signal from noise ({_enough(global_batch_size)})"
        )


class CannotMeasure(TrainingError):
    """Model with gradients that no tap can measure; the message is one line."""


def cannot_measure(problem: str, remedy: str) -> CannotMeasure:
    """Error of a problem and what may be done about it in the model."""
    return CannotMeasure(f"gns.single_pass: {problem} ({remedy}, or {WITHOUT_TAPS})")


def few_pairs(config: GNSConfig, local_batch_size: int, masses: Tensor) -> str | None:
    """Warning if microbatches hold so few samples of a bin that unmeasured steps say next to nothing; None if not."""
    rarest = 1.0 if config.bin_pure_microbatches else masses.min().item()
    if not config.single_pass or local_batch_size * rarest >= 0.99 * _LEAST_PER_BIN:  # edges are rounded
        return None
    return (
        f"gns: of a microbatch of {local_batch_size} images the rarest of {len(masses)} bins has {local_batch_size * rarest:.2g}"
        " on average: between measured steps only pairs of one"
        " microbatch and bin count, of which there are few, so that its modulation estimate is noisy and its composite"
        " is hardly better than the sketch (lower gns.interval, use wider bins, or microbatches of"
        f" {math.ceil(0.99 * _LEAST_PER_BIN / rarest)} or more images)"
    )


def _enough(global_batch_size: int) -> str:
    bins = global_batch_size // _LEAST_PER_BIN
    if not bins:
        return f"raise training.global_batch_size to {_LEAST_PER_BIN} or more"
    return f"use {counted(bins, 'bin')}{' or fewer' if bins > 1 else ''}"


def _rank_problems(config: GNSConfig, objective: Objective, microbatches: int, ranks: int) -> Iterator[tuple[str, str]]:
    if not config.rank_gradients:
        return
    spread = objective.timestep_sampler.spread
    if spread != "none":
        yield "rank_gradients", (
            f"objective.spread = {spread} makes the ranks' timesteps depend on each other, so their gradients differ less"
            " than independent ones (set objective.spread to none, or rank_gradients to false)"
        )
    if ranks == 1 and config.bin_pure_microbatches:
        yield "bin_pure_microbatches", "one process has no second gradient of the same bin to compare (use 2 or more)"
    elif ranks == 1 and microbatches == 1:
        yield "rank_gradients", (
            "one process with one microbatch a step has no two gradients to compare (use more processes, or a"
            " training.global_batch_size above training.local_batch_size)"
        )
