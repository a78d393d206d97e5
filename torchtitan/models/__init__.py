"""Families of networks by the name in `model.name`."""

from torchtitan.conditions import ConditionKind, Unconditional
from torchtitan.models.base import DiffusionModel, ModelConfig, ModelFamily
from torchtitan.settings import Registry

MODELS: Registry[ModelFamily] = Registry("torchtitan.models", {
    "dit": "dit.FAMILY",
    "edm2": "edm2.FAMILY",
    "flux": "flux.FAMILY",
}, ModelFamily)


def build_model(config: ModelConfig, image_shape: tuple[int, int, int], offered: ConditionKind) -> DiffusionModel:
    """Build the network of a configuration, without values, for images that come with conditions of a kind."""
    family = MODELS[config.name]
    return family.build(config, image_shape, offered if isinstance(offered, family.conditions) else Unconditional())
