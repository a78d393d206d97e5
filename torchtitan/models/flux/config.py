"""Architecture of Flux: one field per choice, and the table of named sizes."""

from dataclasses import dataclass, replace
from typing import Any, Literal

from torchtitan.models.base import ModelConfig
from torchtitan.settings import setting


@dataclass(kw_only=True)
class FluxConfig(ModelConfig):
    """`[model]` for the Flux family: a row of FLAVORS, every field of which can be overridden."""

    name: Literal["flux"] = setting("flux", "model family")
    flavor: str = setting("schnell", "row of the family's table of sizes; the keys below override its fields")
    dim: int = setting(3072, "width of the token streams", ge=8, le=65536)
    num_heads: int = setting(24, "attention heads; must divide dim", ge=1, le=65536)
    num_double_layers: int = setting(19, "blocks in which image and text have weights of their own", ge=1, le=4096)
    num_single_layers: int = setting(38, "blocks with one set of weights for all tokens, after those", ge=1, le=4096)
    patch_size: int = setting(2, "side of the square patch that becomes one token, in pixels or latents", ge=1, le=1024)
    mlp_hidden_dim: int = setting(12288, "hidden width of the feed-forward layers", ge=1, le=524288)
    axes_dim: list[int] = setting(
        [16, 56, 56], "channels of a head that rotary embedding turns by place in the text (always 0), row and column"
    )
    text_dim: int = setting(4096, "width of the text's token embeddings, that of the text encoder", ge=1, le=65536)
    pooled_dim: int = setting(768, "width of the embedding of the whole text", ge=1, le=65536)
    guidance_embedding: bool = setting(False, "whether a guidance scale is an input, as in guidance-distilled models")
    guidance: float = setting(
        3.5, "guidance scale given in training and, by default, in sampling", ge=0, le=100,
        applies={"guidance_embedding": (True,)},
    )  # fmt: skip
    label_dropout: float = setting(
        0.1, "probability of replacing the caption by the null caption in training, for guidance", ge=0, lt=1
    )

    @property
    def head_width(self) -> int:
        return self.dim // self.num_heads

    @property
    def depth(self) -> int:
        return self.num_double_layers + self.num_single_layers

    def sampling_defaults(self, path_name: str) -> dict[str, Any]:
        """Sampling of FLUX.1 as published: [dev] has a guidance embedding, [schnell] was distilled to four steps.

        Source: black-forest-labs' sampling code of FLUX.1. On another path than its flow nothing is published.
        """
        if path_name != "rectified_flow":
            return {}
        steps, schedule = (50, "flux_shift") if self.guidance_embedding else (4, "uniform")
        return {"num_steps": steps, "solver.name": "euler", "schedule.name": schedule, "guidance_scale": 1.0}


_SMALL = FluxConfig(text_dim=64, pooled_dim=64)

# Sizes of black-forest-labs' FLUX.1: 12 B parameters at 16 latent channels; both were published, schnell without the
# guidance embedding.
FLAVORS: dict[str, FluxConfig] = {
    "dev": FluxConfig(flavor="dev", guidance_embedding=True),
    "schnell": FluxConfig(flavor="schnell"),
    "tiny": replace(
        _SMALL, flavor="tiny", dim=256, num_heads=4, num_double_layers=3, num_single_layers=6, mlp_hidden_dim=1024,
        axes_dim=[8, 28, 28],
    ),
    # CIFAR-10's pixels in 64 tokens: 2.3 M parameters, of which two CPU cores train enough.
    "cifar": replace(
        _SMALL, flavor="cifar", dim=128, num_heads=4, num_double_layers=2, num_single_layers=4, mlp_hidden_dim=512,
        axes_dim=[4, 14, 14], patch_size=4,
    ),
    "debug": replace(
        _SMALL, flavor="debug", dim=64, num_heads=4, num_double_layers=2, num_single_layers=2, mlp_hidden_dim=256,
        axes_dim=[4, 6, 6], text_dim=32, pooled_dim=24,
    ),
}  # fmt: skip
