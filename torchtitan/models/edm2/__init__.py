"""U-Nets of EDM2: configurations C, E and G."""

from torchtitan.conditions import Classes, Unconditional
from torchtitan.models.base import ModelFamily
from torchtitan.models.edm2.config import FLAVORS, EDM2Config
from torchtitan.models.edm2.conversion import LAYOUTS
from torchtitan.models.edm2.model import EDM2UNet, problems

FAMILY = ModelFamily(
    config_class=EDM2Config, flavors=FLAVORS, build=EDM2UNet, problems=problems, conditions=(Unconditional, Classes),
    layouts=LAYOUTS,
)  # fmt: skip
