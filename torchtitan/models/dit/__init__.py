"""Diffusion transformers."""

from torchtitan.conditions import Classes, ConditionKind, Unconditional
from torchtitan.models.base import ModelFamily
from torchtitan.models.dit.config import FLAVORS, DiTConfig, condition_problems, problems
from torchtitan.models.dit.conversion import LAYOUTS
from torchtitan.models.dit.magnitude_preserving import MagnitudePreservingDiT
from torchtitan.models.dit.model import DiT, PatchTransformer


def build(config: DiTConfig, image_shape: tuple[int, int, int], condition_kind: ConditionKind) -> PatchTransformer:
    """Build a diffusion transformer: plain, magnitude-preserving, with a wide head or with routed tokens."""
    network: type[PatchTransformer] = MagnitudePreservingDiT if config.magnitude_preserving else DiT
    if config.wide_dim and not config.magnitude_preserving:
        from torchtitan.models.dit.wide_head import WideHeadDiT

        network = WideHeadDiT
    if config.routing.name != "none":
        from torchtitan.models.dit.routing import ROUTED

        network = ROUTED[config.routing.name]
    return network(config, image_shape, condition_kind)


FAMILY = ModelFamily(
    config_class=DiTConfig, flavors=FLAVORS, build=build, problems=problems, conditions=(Unconditional, Classes),
    layouts=LAYOUTS, condition_problems=condition_problems, splits_tokens=True,
)  # fmt: skip
