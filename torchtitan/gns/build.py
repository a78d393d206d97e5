"""A run's monitor of its gradient noise: taps, ranks' gradients and timestep sampler, as `[gns]` asks for them."""

from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from torchtitan.diffusion.objective import Objective
from torchtitan.diffusion.timesteps.bin_pure import BinPureTimesteps
from torchtitan.diffusion.timesteps.registry import SamplerOf
from torchtitan.diffusion.timesteps.shares import AllocatedTimesteps
from torchtitan.distributed.mesh import Layout
from torchtitan.distributed.precision import DTYPES
from torchtitan.gns.capture import GradientTaps
from torchtitan.gns.config import GNSConfig
from torchtitan.gns.monitor import GNSMonitor
from torchtitan.gns.ranks import RankMonitor
from torchtitan.models.base import DiffusionModel


def build_taps(config: Any, model: DiffusionModel, edges: Tensor, layout: Layout) -> GradientTaps:
    """Install taps in a network that is not yet distributed; edges: inner ones of the bins in t, rising, [K - 1]."""
    return GradientTaps(
        model, bin_edges=edges, local_batch_size=config.training.local_batch_size, sketch_size=config.gns.sketch_size,
        seed=config.debug.seed, adam=config.optimizer.rule.is_adams and config.gns.adam_geometry, device=layout.device,
        compute_dtype=DTYPES[config.training.mixed_precision_param],
        reduce_dtype=DTYPES[config.training.mixed_precision_reduce],
    )  # fmt: skip


def build_monitor(
    config: Any, objective: Objective, edges: Tensor, taps: GradientTaps | None, train_module: nn.Module, layout: Layout,
    folder: Path, *, microbatches: int, matrices: dict[nn.Parameter, float],
) -> GNSMonitor:  # fmt: skip
    """Build the monitor of a run.

    Args:
        train_module: the network as it is trained, wrapped by DDP or FSDP, for the ranks' gradients.
        microbatches: of each rank in a step of the first batch size.
        matrices: that Muon updates, and the sizes of its updates.
    """
    gns, ranks = config.gns, None
    if gns.rank_gradients:
        ranks = RankMonitor(
            train_module, layout, microbatches=microbatches, num_bins=len(edges) + 1 if gns.bin_pure_microbatches else None,
            half_life=gns.half_life * (1 if gns.bin_pure_microbatches else len(edges) + 1),
            matrices=matrices if gns.nuclear_norm else None, interval=gns.interval,
        )  # fmt: skip
    return GNSMonitor(
        gns, objective=objective, edges=edges, taps=taps, ranks=ranks, layout=layout, folder=folder,
        adam=config.optimizer.rule.is_adams,
    )  # fmt: skip


def sampler_of_bins(config: GNSConfig, edges: Tensor, microbatches: int) -> SamplerOf | None:
    """Timestep sampler by the bins, if it differs from the objective's."""
    if config.bin_pure_microbatches:
        return partial(BinPureTimesteps, edges=edges, microbatches_per_step=microbatches)
    return partial(AllocatedTimesteps, edges=edges) if config.allocate_timesteps else None
