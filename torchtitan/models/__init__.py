"""Families of networks by the name in `model.name`."""

from dataclasses import fields

from torchtitan.conditions import ConditionKind, Unconditional
from torchtitan.files.weight_files import WeightsError
from torchtitan.models.base import DiffusionModel, ModelConfig, ModelFamily
from torchtitan.settings import Registry
from torchtitan.settings.record import value_text

MODELS: Registry[ModelFamily] = Registry("torchtitan.models", {
    "dit": "dit.FAMILY",
    "edm2": "edm2.FAMILY",
    "flux": "flux.FAMILY",
}, ModelFamily)

_REQUIRED = ("forward", "init_weights", "init_buffers", "blocks", "linear_roles")  # methods of every network


def flavor_and_changes(config: ModelConfig) -> str:
    """Name the flavor and each key that the configuration sets otherwise, as "DiT-S/2 (num_layers = 4)"."""
    row = MODELS[config.name].flavors.get(config.flavor, config)
    names = [field.name for field in fields(row) if field.name != "name"]
    changes = [
        f"{name} = {value_text(getattr(value, 'name', value))}"  # of a section its name
        for name in names if (value := getattr(config, name)) != getattr(row, name)
    ]  # fmt: skip
    return f"{config.flavor} ({', '.join(changes)})" if changes else config.flavor


def build_model(config: ModelConfig, image_shape: tuple[int, int, int], offered: ConditionKind) -> DiffusionModel:
    """Build the network of a configuration, without values, for images that come with conditions of a kind."""
    family = MODELS[config.name]
    model = family.build(config, image_shape, offered if isinstance(offered, family.conditions) else Unconditional())
    lacking = [name for name in _REQUIRED if getattr(type(model), name, None) in (None, getattr(DiffusionModel, name))]
    if lacking:
        raise WeightsError(f"model.name = {config.name}: {type(model).__name__} lacks {', '.join(lacking)}")
    return model
