"""`[gns]`: its keys, and the edges of the bins that they describe."""

from dataclasses import dataclass

import torch
from torch import Tensor

from torchtitan.diffusion.objective import ObjectiveConfig
from torchtitan.diffusion.paths import PATHS
from torchtitan.diffusion.timesteps.placement import Density
from torchtitan.diffusion.timesteps.registry import build_density
from torchtitan.settings import only_with, setting

# Folder in that of a run, and the picture in it.
GNS_FOLDER, PICTURE_FILE = "gns", "noise_scale.png"

# Advice where the taps cannot measure a network or an objective.
WITHOUT_TAPS = (
    "set gns.enable to false, or, with two or more processes or microbatches and objective.spread = none, gns.single_pass to"
    " false and gns.rank_gradients to true"
)

_TAPPED = {"single_pass": (True,)}
_BINNED = {"single_pass or bin_pure_microbatches": (True,)}


@only_with("enable")
@dataclass(kw_only=True)
class GNSConfig:
    """`[gns]`: gradient noise scale per timestep bin, measured while training."""

    enable: bool = setting(False, "measure the gradient noise scale of every timestep bin", trajectory=False)
    interval: int = setting(
        8, "steps between measured steps, with sketches of all layers", ge=1, applies=_TAPPED, trajectory=False
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
        32768.0, "longest half-life of a measurement, in samples trained of its bin; shorter where the noise scale drifts, "
        "but for rank_gradients",
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
