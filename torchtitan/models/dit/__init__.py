"""Diffusion transformers."""

from torchtitan.conditions import Classes, ConditionKind, Unconditional
from torchtitan.models.base import ModelFamily
from torchtitan.models.dit.config import FLAVORS, DiTConfig
from torchtitan.models.dit.conversion import LAYOUTS
from torchtitan.models.dit.magnitude_preserving import MagnitudePreservingDiT
from torchtitan.models.dit.model import DiT, PatchTransformer, problems


def build(config: DiTConfig, image_shape: tuple[int, int, int], condition_kind: ConditionKind) -> PatchTransformer:
    """Build a diffusion transformer, plain or magnitude-preserving."""
    network = MagnitudePreservingDiT if config.magnitude_preserving else DiT
    return network(config, image_shape, condition_kind)


FAMILY = ModelFamily(
    config_class=DiTConfig, flavors=FLAVORS, build=build, problems=problems, conditions=(Unconditional, Classes),
    layouts=LAYOUTS, splits_tokens=True,
)  # fmt: skip
