"""Architecture of an EDM2 U-Net: one field per choice, and the table of named sizes."""

from dataclasses import dataclass
from typing import Literal

from torchtitan.models.base import ModelConfig
from torchtitan.settings import setting


@dataclass(kw_only=True)
class EDM2Config(ModelConfig):
    """`[model]` for the EDM2 family: a row of FLAVORS, every field of which can be overridden."""

    name: Literal["edm2"] = setting("edm2", "model family")
    flavor: str = setting("cifar", "row of the family's table of sizes; the keys below override its fields")
    config: Literal["C", "E", "G"] = setting(
        "G", "configuration of the EDM2 paper: C: group norms, plain weights; E: the same with normalised weights; G: no "
        "group norms, magnitudes preserved throughout"
    )
    channels: int = setting(128, "base width: of the first level, times its multiplier", ge=8, le=65536)
    channel_mults: list[int] = setting(
        [1, 2, 2, 2], "multiplier of the base width at each level; each after the first halves the image"
    )
    num_blocks: int = setting(2, "encoder blocks at each level; the decoder has one more", ge=1, le=64)
    attention_resolutions: list[int] = setting(
        [16], "sides of the feature maps with attention; the first middle block has it at any size"
    )
    channels_per_head: int = setting(0, "channels of each attention head; 0: one head of all channels", ge=0, le=65536)
    dropout: float = setting(
        0.13, "probability of dropping an activation before a block's second convolution, in training", ge=0, le=0.99
    )
    middle_blocks: Literal["encoder", "decoder"] = setting(
        "encoder", "kind of the two middle blocks: with the pixel norm of encoder blocks, or as decoder blocks",
        applies={"config": ("G",)},
    )  # fmt: skip
    embedding_gain_init: float = setting(
        1.0, "initial gain on the embedding of noise level and class in each block", ge=-100, le=100,
        applies={"config": ("G",)},
    )  # fmt: skip
    pixel_norm_epsilon: Literal["added_to_square", "added_to_norm"] = setting(
        "added_to_square", "norm of pixels, queries, keys and values: x / sqrt(mean x^2 + 1e-8), or x / (1e-4 + rms x)"
    )
    label_dropout: float = setting(
        0.0, "probability of replacing the class by the null class in training, for guidance", ge=0, lt=1
    )

    @property
    def depth(self) -> int:
        levels = len(self.channel_mults)
        return levels * (2 * self.num_blocks + 1) + 2 * (levels - 1) + 2

    @property
    def normalizes_weights(self) -> bool:
        return self.config != "C"


def _nvlabs(size: str, channels: int, dropout: float = 0.0) -> EDM2Config:
    return EDM2Config(
        flavor=size, channels=channels, channel_mults=[1, 2, 3, 4], num_blocks=3, attention_resolutions=[16, 8],
        channels_per_head=64, dropout=dropout, middle_blocks="decoder", embedding_gain_init=0.0,
        pixel_norm_epsilon="added_to_norm",
    )  # fmt: skip


FLAVORS: dict[str, EDM2Config] = {
    # FutureXiang/edm2, config/*.yaml.
    "cifar": EDM2Config(),
    "tiny_imagenet": EDM2Config(flavor="tiny_imagenet", num_blocks=4, dropout=0.1),
    # Karras et al., arXiv 2312.02696, Table 6; dropout of ImageNet-512.
    "XXS": _nvlabs("XXS", 64),
    "XS": _nvlabs("XS", 128),
    "S": _nvlabs("S", 192),
    "M": _nvlabs("M", 256, 0.1),
    "L": _nvlabs("L", 320, 0.1),
    "XL": _nvlabs("XL", 384, 0.1),
    "XXL": _nvlabs("XXL", 448, 0.1),
}
