"""Diffusion transformers."""

from torchtitan.conditions import Classes, Unconditional
from torchtitan.models.base import ModelFamily
from torchtitan.models.dit.config import FLAVORS, DiTConfig
from torchtitan.models.dit.model import DiT, problems

FAMILY = ModelFamily(
    config_class=DiTConfig, flavors=FLAVORS, build=DiT, problems=problems, conditions=(Unconditional, Classes)
)
