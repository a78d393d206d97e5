"""Architecture of a diffusion transformer: one field per choice, and the table of named sizes."""

from dataclasses import dataclass, replace
from typing import Literal

from torchtitan.models.base import ModelConfig
from torchtitan.settings import setting

_PLAIN = {"magnitude_preserving": (False,)}
_ONE_EMBEDDING = _PLAIN | {"embedding_per_block": (False,)}


@dataclass(kw_only=True)
class DiTConfig(ModelConfig):
    """`[model]` for the DiT family: a row of FLAVORS, every field of which can be overridden."""

    name: Literal["dit"] = setting("dit", "model family")
    flavor: str = setting("DiT-S/2", "row of the family's table of sizes; the keys below override its fields")
    dim: int = setting(384, "width of the token stream", ge=8, le=65536)
    num_layers: int = setting(12, "number of transformer blocks", ge=1, le=4096)
    num_heads: int = setting(6, "attention heads; must divide dim", ge=1, le=65536)
    patch_size: int = setting(2, "side of the square patch that becomes one token, in pixels or latents", ge=1, le=1024)
    mlp: Literal["gelu", "swiglu"] = setting("gelu", "feed-forward layer of a block")
    mlp_hidden_dim: int = setting(1536, "hidden width of the feed-forward layer", ge=1, le=524288)
    magnitude_preserving: bool = setting(
        False, "normalise weights before each step and keep activations at unit mean square, as EDM2 does; no biases or norms"
    )
    norm: Literal["layernorm", "rmsnorm"] = setting(
        "layernorm", "normalisation before attention and feed-forward", applies=_PLAIN
    )
    norm_affine: bool = setting(False, "whether the block's norms carry a learned gain", applies=_PLAIN)
    norm_eps: float = setting(1e-6, "added to the variance in every norm", gt=0, le=1, applies=_PLAIN)
    mlp_norm_eps: float | None = setting(
        None, "added to the variance in the norm before the feed-forward layer; default: norm_eps", gt=0, le=1, applies=_PLAIN
    )
    qk_norm: bool = setting(False, "RMS-normalise queries and keys per head, with a learned gain", applies=_PLAIN)
    attention_bias: bool = setting(True, "biases in the attention projections", applies=_PLAIN)
    position: Literal["sincos", "rotary"] = setting(
        "sincos", "fixed 2-D sine-cosine table added to the tokens, or 2-D rotary embedding of queries and keys"
    )
    timestep_frequencies: Literal["dit", "diffusers"] = setting(
        "dit", "frequencies of the timestep's sinusoid: 10000^(-i / 128) for i = 0..127, or diffusers' 10000^(-i / 127)"
    )
    embedding_per_block: bool = setting(
        False, "separate embeddings of timestep and class in each block, as diffusers trains them", applies=_PLAIN
    )
    final_modulation: bool = setting(True, "adaLN shift and scale before the output layer", applies=_PLAIN)
    label_dropout: float = setting(
        0.1, "probability of replacing the class by the null class in training, for guidance", ge=0, lt=1
    )
    learned_variance: bool = setting(False, "twice the output channels: prediction and variance interpolation")
    num_predictions: int = setting(
        1, "images that the network predicts for each input; one for each of objective.heads, which set it", ge=1
    )
    intermediate_head: int | None = setting(
        None, "number of blocks before a second output layer, which is trained on the same target as the last one, for "
        "sampling with --guide head", ge=1, applies=_ONE_EMBEDDING | {"learned_variance": (False,)},
    )  # fmt: skip

    @property
    def head_width(self) -> int:
        return self.dim // self.num_heads

    @property
    def depth(self) -> int:
        return self.num_layers

    def of_depth(self, depth: int) -> "DiTConfig | None":
        return None if self.intermediate_head else replace(self, num_layers=depth)

    @property
    def normalizes_weights(self) -> bool:
        return self.magnitude_preserving


def _peebles_xie(size: str, dim: int, num_layers: int, num_heads: int) -> dict[str, DiTConfig]:
    return {
        f"{size}/{patch_size}": DiTConfig(
            flavor=f"{size}/{patch_size}",
            dim=dim,
            num_layers=num_layers,
            num_heads=num_heads,
            patch_size=patch_size,
            mlp_hidden_dim=4 * dim,
        )
        for patch_size in (2, 4, 8)
    }


def _torchditan(flavor: str, dim: int, num_layers: int, num_heads: int, mlp_hidden_dim: int) -> DiTConfig:
    return DiTConfig(
        flavor=flavor, dim=dim, num_layers=num_layers, num_heads=num_heads, mlp="swiglu", mlp_hidden_dim=mlp_hidden_dim,
        norm="rmsnorm", norm_affine=True, norm_eps=1e-5, attention_bias=False, position="rotary",
        final_modulation=False, label_dropout=0.05,
    )  # fmt: skip


_SMALL = DiTConfig(norm="rmsnorm", qk_norm=True, mlp="swiglu", position="rotary")

FLAVORS: dict[str, DiTConfig] = {
    # Peebles and Xie, "Scalable Diffusion Models with Transformers", Table 1.
    **_peebles_xie("DiT-S", 384, 12, 6),
    **_peebles_xie("DiT-B", 768, 12, 12),
    **_peebles_xie("DiT-L", 1024, 24, 16),
    **_peebles_xie("DiT-XL", 1152, 28, 16),
    # TorchDiTan's two benchmark sizes; head size 40 of the 7B pads in attention kernels, hence its variant.
    "TorchDiTan-L": _torchditan("TorchDiTan-L", 1024, 24, 16, 2816),
    "TorchDiTan-7B": _torchditan("TorchDiTan-7B", 2560, 60, 64, 6912),
    "TorchDiTan-7B-head128": _torchditan("TorchDiTan-7B-head128", 2560, 60, 20, 6912),
    "digits": replace(_SMALL, flavor="digits", dim=192, num_layers=6, num_heads=6, mlp_hidden_dim=512),
    "cifar": replace(_SMALL, flavor="cifar", dim=384, num_layers=12, num_heads=6, mlp_hidden_dim=1024),
    "debug": replace(_SMALL, flavor="debug", dim=64, num_layers=3, num_heads=4, mlp_hidden_dim=128),
}
