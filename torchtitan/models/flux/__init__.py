"""Flux: transformers over the tokens of an image and of its text."""

from torchtitan.conditions import Embeddings
from torchtitan.models.base import ModelFamily
from torchtitan.models.flux.config import FLAVORS, FluxConfig
from torchtitan.models.flux.conversion import LAYOUTS
from torchtitan.models.flux.model import Flux, condition_problems, problems

FAMILY = ModelFamily(
    config_class=FluxConfig, flavors=FLAVORS, build=Flux, problems=problems, conditions=(Embeddings,),
    layouts=LAYOUTS, condition_problems=condition_problems, many_shapes=True,
)  # fmt: skip
