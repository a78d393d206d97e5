"""Flux: transformers over the tokens of an image and of its text."""

from torchtitan.conditions import Embeddings
from torchtitan.models.base import ModelFamily
from torchtitan.models.flux.adapter_layouts import LAYOUTS as ADAPTER_LAYOUTS
from torchtitan.models.flux.adapter_sets import SETS
from torchtitan.models.flux.config import FLAVORS, FluxConfig
from torchtitan.models.flux.conversion import LAYOUTS
from torchtitan.models.flux.model import Flux, condition_problems, problems

FAMILY = ModelFamily(
    config_class=FluxConfig, flavors=FLAVORS, build=Flux, problems=problems, conditions=(Embeddings,),
    layouts=LAYOUTS, condition_problems=condition_problems, many_shapes=True,
    adapter_sets=SETS, adapter_layouts=ADAPTER_LAYOUTS,
)  # fmt: skip
