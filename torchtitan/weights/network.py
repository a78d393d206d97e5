"""Network of a run without adapters: drawn or filled from its initial weights.

Sharded, every rank has its shards of it; quantised weights are whole on every rank, as they are while the run trains.
"""

import logging
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan.config.job import JobConfig
from torchtitan.data.base import DatasetInfo
from torchtitan.diffusion.objectives import attach, build_objective
from torchtitan.distributed.mesh import Layout
from torchtitan.distributed.shard_drawing import NotByShards, draw_shards, own_rows
from torchtitan.errors import CheckpointError
from torchtitan.files.weight_files import (
    WeightsError,
    check_fits,
    each_tensor,
    fill,
    fill_rows,
    named_weights,
    saved_buffers,
)
from torchtitan.models import build_model
from torchtitan.models.base import DiffusionModel
from torchtitan.pictures.number_text import first_named

if TYPE_CHECKING:
    from torchtitan.alignment.plan import Plan

logger = logging.getLogger(__name__)

BASE_SHA256 = "lora_base_joined_sha256"  # entry of a checkpoint's state: hash of the frozen network
_ZERO_STD = 0.02


def network_on_meta(config: JobConfig, info: DatasetInfo) -> DiffusionModel:
    """Network without adapters on the meta device."""
    with torch.device("meta"):
        return build_model(config.model, info.image_shape, info.condition_kind)


def check_objective(config: JobConfig, info: DatasetInfo) -> None:
    """Check on the meta device that objective and alignment can be trained on their network and data. Raises ConfigError."""
    attach(build_objective(config.objective, config.debug.seed), network_on_meta(config, info), info.trained_entries)
    alignment_plan(config, info)


def alignment_plan(config: JobConfig, info: DatasetInfo) -> "Plan | None":
    """Plan of the run's alignment; None without one. Raises ConfigError."""
    if config.alignment.teacher == "none":
        return None
    from torchtitan.alignment.plan import Plan

    return Plan(config.alignment, network_on_meta(config, info), info)


def new_network(config: JobConfig, info: DatasetInfo, device: torch.device, initial_weights: str = "") -> DiffusionModel:
    """Network without adapters, drawn or read; the same on any layout. Raises WeightsError.

    Args:
        initial_weights: file that fills it; none: it is drawn from the run's seed, for adapters without zero gains and matrices.
    """
    model = network_on_meta(config, info)
    kind = config.lora.quantized_kind
    if config.lora.enable:
        from torchtitan.models.adapters.frozen_network import cast_base
        from torchtitan.models.quantized import quantize_base

        cast_base(model, config.lora)
    if kind and initial_weights:
        check_fits(Path(initial_weights), model)
        quantize_base(model, kind, values=False)
        model.to_empty(device=device)
        model.init_buffers()
        _fill_quantized(model, Path(initial_weights))
        return model
    torch.manual_seed(config.debug.seed)
    model.to_empty(device=device)
    _draw_all(model)
    if initial_weights:
        fill(model, Path(initial_weights), config.checkpoint.initial_weights_strict)
    elif config.lora.enable:
        _draw_zeros(model)
    if kind:
        quantize_base(model, kind)
    return model


def _draw_all(model: DiffusionModel) -> None:
    """Draw the weights and buffers of a model just given its memory. Raises WeightsError: init_weights leaves some unset."""
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            tensor.detach().fill_(torch.nan)
    model.init_weights()
    named = (*model.named_parameters(), *model.named_buffers())  # listed again: init_weights may assign new tensors
    left = [name for name, tensor in named if tensor.is_floating_point() and tensor.isnan().any()]
    if left:
        text = f"init_weights leaves {first_named(left, 3)} without values (what __init__ sets is lost)"
        raise WeightsError(f"{type(model).__name__}: {text}")


def sharded_network(
    config: JobConfig, info: DatasetInfo, layout: Layout, initial_weights: str = ""
) -> tuple[DiffusionModel, dict[str, Tensor]]:
    """Network of a run with a sharded layout and without adapters: the values of `new_network`, of which this rank has
    its shards alone; collective. No quantised one.

    Returns:
        the network on the meta device, its buffers aside; the shards of its parameters, for `place_shards` once it is
        sharded. None of the latter for a network that cannot be drawn so: it is on the layout's device, whole.

    Raises:
        WeightsError.
    """
    model = network_on_meta(config, info)
    if config.lora.enable:
        from torchtitan.models.adapters.frozen_network import cast_base

        cast_base(model, config.lora)
    rows_of = partial(own_rows, layout=layout)
    torch.manual_seed(config.debug.seed)
    try:
        shards = draw_shards(model, model.init_weights, rows_of, layout.device)
    except NotByShards as operation:
        if layout.rank == 0:
            logger.warning(
                f"model.name: {config.model.name}: its init_weights applies {operation} to a part of a parameter, so every rank"
                " draws the whole model (whole parameters, in place, would be drawn shard by shard)"
            )
        return new_network(config, info, layout.device, initial_weights), {}
    if initial_weights:
        path = Path(initial_weights)
        check_fits(path, model, config.checkpoint.initial_weights_strict)
        rows = {name: rows_of(tuple(parameter.shape)) for name, parameter in model.named_parameters()}
        fill_rows(shards | saved_buffers(model), rows, path)
    elif config.lora.enable:
        _draw_zero_shards(model, shards, layout)
    return model, shards


@torch.no_grad()
def _fill_quantized(model: DiffusionModel, path: Path) -> None:
    """Fill a network that is partly quantised, tensor by tensor: no more than one is in memory whole. Raises WeightsError."""
    from torchtitan.models.quantized import quantized_weights

    weights, quantized = named_weights(model), quantized_weights(model)
    for name, tensor in each_tensor(path):
        if name in quantized:
            quantized[name].quantize(tensor)
        else:
            weights[name].copy_(tensor)


@torch.no_grad()
def _draw_zeros(model: DiffusionModel) -> None:
    """Draw the matrices and gains that a network starts from as zeros: frozen at zero, they would let no gradient through."""
    for name, parameter in model.named_parameters():
        if (parameter.ndim > 1 or name.endswith("gain")) and not parameter.any():  # biases may be zero
            parameter.normal_(std=_ZERO_STD)


@torch.no_grad()
def _draw_zero_shards(model: DiffusionModel, shards: dict[str, Tensor], layout: Layout) -> None:
    """Draw as `_draw_zeros`, of which this rank keeps its shards; collective."""
    names = [name for name, parameter in model.named_parameters() if parameter.ndim > 1 or name.endswith("gain")]
    drawn = torch.stack([shards[name].any() for name in names]).to(torch.int32)
    dist.all_reduce(drawn, op=dist.ReduceOp.MAX, group=layout.shard_group)
    for name, is_drawn in zip(names, drawn.tolist(), strict=True):
        if not is_drawn:
            whole = torch.empty(model.get_parameter(name).shape, dtype=shards[name].dtype, device=layout.device)
            shards[name].copy_(whole.normal_(std=_ZERO_STD)[own_rows(tuple(whole.shape), layout)])


def check_base(state: dict, digest: str, place: str, config: JobConfig) -> None:
    """Check that a frozen network is the one of a checkpoint's adapters. Raises CheckpointError."""
    if state.get(BASE_SHA256) != digest:
        path, files = config.checkpoint.initial_weights, "file"
        source = f"checkpoint.initial_weights = {path}" if path else "those drawn from debug.seed"
        if config.lora.extra:
            source, files = f"{source} with the adapters of [[lora.extra]]", "files"
        raise CheckpointError(
            f"{place}: its adapters were trained on other frozen weights than {source} (name the {files} of those)"
        )
