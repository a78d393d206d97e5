"""Network of a run that trains adapters: frozen, with them added.

With `[lora]` a checkpoint holds the adapters alone. The frozen network is read, or drawn, again at every start, and a hash
in the checkpoint shows that it is the one that the adapters were trained with.
"""

import hashlib
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from torchtitan.config.job import JobConfig
from torchtitan.data.base import DatasetInfo
from torchtitan.distributed.activation_checkpoint import WRAPPER_PREFIX
from torchtitan.distributed.collectives import of_all_ranks
from torchtitan.files.weight_files import named_weights
from torchtitan.files.weight_hash import file_sha256, joined_sha256, tensor_sha256
from torchtitan.models import MODELS
from torchtitan.models.adapters.adapter_files import read_adapter
from torchtitan.models.adapters.adapters import (
    add_frozen_adapter,
    add_trained_adapter,
    draw_adapter,
    fill_adapter,
    is_adapter_parameter,
)
from torchtitan.models.adapters.frozen_network import freeze_and_adapt
from torchtitan.models.adapters.target import AdapterWeights
from torchtitan.models.adapters.targets import find_targets
from torchtitan.models.base import DiffusionModel
from torchtitan.models.quantized import quantized_tensors
from torchtitan.weights.network import network_on_meta, new_network


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
    """Freeze a network, maybe on meta, and add the adapters of `[lora]` as they are at the run's start; in place.

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
    """Hash of frozen weights, as `adapted_network`'s, of any wrapper; collective: sharded ones are gathered singly."""
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
