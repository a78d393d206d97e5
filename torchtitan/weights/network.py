"""Network of a run: drawn or filled from its initial weights and, where the run trains adapters, frozen with them added.

With `[lora]` a checkpoint holds the adapters alone. The frozen network is read, or drawn, again at every start, and a hash
in the checkpoint shows that it is the one that the adapters were trained with. Sharded, every rank has its shards of it;
quantised weights are whole on every rank, as they are while the run trains.
"""

import hashlib
import logging
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from torchtitan.config.job import JobConfig
from torchtitan.data.base import DatasetInfo
from torchtitan.distributed.activation_checkpoint import WRAPPER_PREFIX
from torchtitan.distributed.collectives import of_all_ranks
from torchtitan.distributed.mesh import Layout
from torchtitan.distributed.shard_drawing import NotByShards, draw_shards, own_rows
from torchtitan.errors import CheckpointError
from torchtitan.files.weight_files import check_fits, each_tensor, fill, fill_rows, named_weights, saved_buffers
from torchtitan.files.weight_hash import file_sha256, joined_sha256, tensor_sha256
from torchtitan.models import MODELS, build_model
from torchtitan.models.adapters.adapter_files import read_adapter
from torchtitan.models.adapters.adapters import (
    add_frozen_adapter,
    add_trained_adapter,
    draw_adapter,
    fill_adapter,
    is_adapter_parameter,
)
from torchtitan.models.adapters.frozen_network import cast_base, freeze_and_adapt, quantized_kind
from torchtitan.models.adapters.target import AdapterWeights
from torchtitan.models.adapters.targets import find_targets
from torchtitan.models.base import DiffusionModel
from torchtitan.models.quantized import quantize_base, quantized_tensors, quantized_weights

logger = logging.getLogger(__name__)

BASE_SHA256 = "lora_base_joined_sha256"  # entry of a checkpoint's state: hash of the frozen network
_ZERO_STD = 0.02


def network_on_meta(config: JobConfig, info: DatasetInfo) -> DiffusionModel:
    """Network without adapters on the meta device."""
    with torch.device("meta"):
        return build_model(config.model, info.image_shape, info.condition_kind)


def new_network(config: JobConfig, info: DatasetInfo, device: torch.device, initial_weights: str = "") -> DiffusionModel:
    """Network without adapters, drawn or read; the same on any layout.

    Args:
        device: of the network, which it is on whole.
        initial_weights: file that fills it; none: it is drawn from the run's seed, for adapters without zero gains and matrices.

    Raises:
        WeightsError.
    """
    model = network_on_meta(config, info)
    kind = quantized_kind(config.lora)
    if config.lora.enable:
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
    model.init_weights()
    if initial_weights:
        fill(model, Path(initial_weights), config.checkpoint.initial_weights_strict)
    elif config.lora.enable:
        _draw_zeros(model)
    if kind:
        quantize_base(model, kind)
    return model


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


def adapted_network(config: JobConfig, info: DatasetInfo, device: torch.device) -> tuple[DiffusionModel, str]:
    """Frozen network of a run that trains adapters, whole, with them as they are at the run's start.

    Returns:
        the network; the hash of all frozen weights, before they are cast.

    Raises:
        WeightsError; AdapterError: it cannot have the adapters of `[lora]`.
    """
    initial_weights = config.checkpoint.initial_weights
    model = new_network(config, info, device, initial_weights)
    if initial_weights:
        base = file_sha256(Path(initial_weights))
    else:
        base = joined_sha256({name: tensor_sha256(name, tensor) for name, tensor in _frozen_weights(model).items()})
    add_adapters(model, config, info, device)
    return model, frozen_sha256(config, base)


def add_adapters(model: DiffusionModel, config: JobConfig, info: DatasetInfo, device: torch.device) -> None:
    """Freeze a network and add the adapters of `[lora]` as they are at the run's start; in place.

    Args:
        model: without adapters; its parameters may be on the meta device.
        device: of the adapters, which are whole on it.

    Raises:
        WeightsError; AdapterError: it cannot have them.
    """
    sets = MODELS[config.model.name].adapter_sets
    add_trained_adapter(model, find_targets(model, config.lora, sets), config.lora, device)
    draw_adapter(model, config.debug.seed)
    if config.lora.initial_adapter:
        fill_adapter(model, read_configured(config, info, config.lora.initial_adapter), config.lora.initial_adapter)
    for number, extra in enumerate(config.lora.extra):
        weights = read_configured(config, info, extra.path)
        add_frozen_adapter(model, f"extra{number}", weights, extra.weight, extra.sampling_weight, extra.path, device)


def drawn_sha256(model: DiffusionModel) -> str:
    """Hash of a network's frozen weights, as of `adapted_network`; collective: sharded ones are gathered one at a time.

    Args:
        model: wrapped for its layout or not, the same on every rank.
    """
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    digests = {}
    for number, (name, tensor) in enumerate(_frozen_weights(model).items()):
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if number % world_size == rank:
            digests[name] = tensor_sha256(name, whole)
    return joined_sha256({name: digest for of_rank in of_all_ranks(digests) for name, digest in of_rank.items()})


def _frozen_weights(model: DiffusionModel) -> dict[str, Tensor]:
    """Weights of a network, quantised ones too, without those of its adapters; by their names without any wrapper."""
    found = named_weights(model) | quantized_tensors(model)
    return {
        name.replace(WRAPPER_PREFIX, ""): tensor for name, tensor in found.items() if not is_adapter_parameter(name)
    }


def frozen_sha256(config: JobConfig, base: str) -> str:
    """Hash of a run's frozen weights: of its network, given, and of its further adapters with their multiples."""
    if not config.lora.extra:
        return base
    extras = [(file_sha256(Path(extra.path)), extra.weight, extra.sampling_weight) for extra in config.lora.extra]
    return hashlib.sha256(repr((base, extras)).encode()).hexdigest()


def read_configured(config: JobConfig, info: DatasetInfo, path: str) -> AdapterWeights:
    """Read an adapter for a run's network, from a file in any layout that is known. Raises WeightsError, AdapterError."""
    return read_adapter(Path(path), network_on_meta(config, info), MODELS[config.model.name].adapter_layouts).as_trained


def adapted_network_on_meta(config: JobConfig, info: DatasetInfo) -> DiffusionModel:
    """Network with the adapter that trains, on the meta device. Raises AdapterError: it cannot have it."""
    model = network_on_meta(config, info)
    with torch.device("meta"):
        return freeze_and_adapt(model, config.lora, MODELS[config.model.name].adapter_sets)


def check_adapters(config: JobConfig, info: DatasetInfo) -> None:
    """Check that a run's network can have the adapters of `[lora]`, and that their files fit. Raises WeightsError, AdapterError.
    """
    model = adapted_network_on_meta(config, info)
    if config.lora.initial_adapter:
        fill_adapter(model, read_configured(config, info, config.lora.initial_adapter), config.lora.initial_adapter)
    for extra in config.lora.extra:
        read_configured(config, info, extra.path)


@torch.no_grad()
def _fill_quantized(model: DiffusionModel, path: Path) -> None:
    """Fill a network that is partly quantised, tensor by tensor: no more than one is in memory whole. Raises WeightsError."""
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


def check_base(state: dict, digest: str, place: str, initial_weights: str) -> None:
    """Check that a frozen network is the one of a checkpoint's adapters.

    Raises:
        CheckpointError.
    """
    if state.get(BASE_SHA256) != digest:
        source = f"checkpoint.initial_weights = {initial_weights}" if initial_weights else "those drawn from debug.seed"
        raise CheckpointError(
            f"{place}: its adapters were trained on other frozen weights than {source} (name the file of those)"
        )
