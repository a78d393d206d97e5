"""Frozen network with adapters, without values: dtypes and shapes of a run."""

import torch

from torchtitan.models.adapters.adapters import add_trained_adapter
from torchtitan.models.adapters.config import LoRAConfig
from torchtitan.models.adapters.targets import TargetSets, find_targets
from torchtitan.models.base import DiffusionModel
from torchtitan.models.quantized import quantize_base


def cast_base(model: DiffusionModel, config: LoRAConfig) -> None:
    """Cast every parameter to the dtype that `lora.base_dtype` names or, where it quantises, to bfloat16; in place."""
    dtype = torch.float32 if config.base_dtype == "float32" else torch.bfloat16
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def freeze_and_adapt(model: DiffusionModel, config: LoRAConfig, sets: TargetSets) -> DiffusionModel:
    """Freeze, quantise and adapt a network without values as `[lora]` says; in place; without `lora.enable` nothing.

    Args:
        model: on the meta device, or of fake tensors.
        sets: published sets of the model's family, by name.

    Raises:
        AdapterError, QuantizationError.
    """
    if config.enable:
        cast_base(model, config)
        if kind := config.quantized_kind:
            quantize_base(model, kind, values=False)
        add_trained_adapter(model, find_targets(model, config, sets), config)
    return model
