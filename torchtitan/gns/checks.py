"""`[gns]` sections that could not give a number, or not a right one."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from torchtitan.diffusion.objective import Objective
from torchtitan.diffusion.timesteps.sampler import TimestepSampler
from torchtitan.gns.config import WITHOUT_TAPS, GNSConfig, inner_edges
from torchtitan.pictures.number_text import counted

# Fewer samples of a bin in a step hold hardly a pair, and only pairs say anything of the mean gradient.
_LEAST_PER_BIN = 2


def gns_problems(
    config: GNSConfig, objective: Objective, given: set[str], *, global_batch_size: int, microbatches: int, ranks: int
) -> Iterator[tuple[str, str]]:
    """Find what makes a measurement impossible or wrong.

    Args:
        objective: whose timesteps are binned.
        given: the dotted keys that were set.
        global_batch_size: samples per step.
        microbatches: of each rank in a step.
        ranks: number of processes.

    Returns:
        pairs of a key of the section and the reason.
    """
    if type(objective.timestep_sampler) is not TimestepSampler:
        yield "enable", (
            "objective.timesteps draws with a state or importance weights of its own, of which the measured bins"
            " know nothing (set it to false, or use another sampler)"
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
        yield key, f"no training timestep falls into bin {empty[0]} of {len(counts)} (use fewer or wider bins)"
    if config.single_pass and global_batch_size < _LEAST_PER_BIN * len(counts):
        yield ("bin_edges" if config.bin_edges else "num_bins"), (
            f"{counted(len(counts), 'bin')} {'share' if len(counts) > 1 else 'shares'}"
            f" {counted(global_batch_size, 'image')} per step: a bin needs {_LEAST_PER_BIN} or"
            f" more, for only pairs tell signal from noise ({_enough(global_batch_size)})"
        )


def few_pairs(config: GNSConfig, local_batch_size: int, masses: Tensor) -> str | None:
    """Warning if microbatches hold so few samples of a bin that unmeasured steps say next to nothing; None if not.

    Args:
        local_batch_size: samples per microbatch.
        masses: probability of each bin, [K].
    """
    rarest = masses.min().item()
    if not config.single_pass or local_batch_size * rarest >= 0.99 * _LEAST_PER_BIN:  # edges are rounded
        return None
    return (
        f"gns: the rarest of {len(masses)} bins has {local_batch_size * rarest:.2g} images of a microbatch of {local_batch_size}"
        " on average: between measured steps only pairs of one"
        " microbatch and bin count, of which there are few, so that its modulation estimate is noisy and its composite"
        " is hardly better than the sketch (raise training.local_batch_size to"
        f" {math.ceil(0.99 * _LEAST_PER_BIN / rarest)} or more, or lower gns.interval, or use wider bins)"
    )


def _enough(global_batch_size: int) -> str:
    bins = global_batch_size // _LEAST_PER_BIN
    if not bins:
        return f"raise training.global_batch_size to {_LEAST_PER_BIN} or more"
    return f"use {counted(bins, 'bin')}{' or fewer' if bins > 1 else ''}"


def _rank_problems(
    config: GNSConfig, objective: Objective, microbatches: int, ranks: int
) -> Iterator[tuple[str, str]]:
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
