"""Architecture of a diffusion transformer: one field per choice, and the table of named sizes."""

from dataclasses import dataclass, replace
from typing import Literal

from torchtitan.conditions import Classes, ConditionKind
from torchtitan.models.base import ModelConfig
from torchtitan.settings import Choice, choice, setting

# What no machine holds, and products of which fit in 64 bits.
MOST_TOKENS, MOST_PARAMETERS = 2**24, 10**13

_PLAIN = {"magnitude_preserving": (False,)}
_ONE_EMBEDDING = _PLAIN | {"embedding_per_block": (False,)}


@dataclass(kw_only=True)
class RoutingConfig:
    """`[model.routing]`; by default every block sees every token."""

    name: str = setting("", "blocks that see a random part of an image's tokens in training, never in evaluation and sampling")

    def span(self, num_layers: int) -> range:
        """Routed blocks, from 1, of a network of so many."""
        return range(0)


@dataclass(kw_only=True)
class TreadConfig(RoutingConfig):
    """The other tokens skip the blocks. Source: Krause et al., arXiv 2501.04765."""

    first_block: int = setting(3, "first block of the kept tokens, from 1", ge=1)
    last_block: int | None = setting(
        None, "last block of the kept tokens; default: num_layers - 3 (tread) or num_layers - 2 (sprint)", ge=1
    )
    keep: float = setting(0.5, "share of an image's tokens that are kept", gt=0, le=1)
    finish_steps: int = setting(
        0, "last steps of the run, of training.global_batch_size images, with all tokens in every block", ge=0
    )

    blocks_behind = 3

    def span(self, num_layers: int) -> range:
        return range(self.first_block, (self.last_block or num_layers - self.blocks_behind) + 1)


@dataclass(kw_only=True)
class SprintConfig(TreadConfig):
    """The others come back as a mask token, and a linear fuses all with the tokens before. Source: arXiv 2510.21986."""

    keep: float = setting(0.25, "share of an image's tokens that are kept", gt=0, le=1)
    path_drop: float = setting(
        0.05, "probability of mask tokens for all of an image's tokens behind the blocks, in training", ge=0, lt=1
    )

    blocks_behind = 2


ROUTINGS: dict[str, type[RoutingConfig]] = {"none": RoutingConfig, "tread": TreadConfig, "sprint": SprintConfig}


@dataclass(kw_only=True)
class DiTConfig(ModelConfig):
    """`[model]` for the DiT family: a row of FLAVORS, every field of which can be overridden."""

    name: Literal["dit"] = setting("dit", "model family")
    flavor: str = setting("DiT-S/2", "row of the family's table of sizes; the keys below override its fields")
    dim: int = setting(384, "width of the token stream", ge=8, le=65536)
    num_layers: int = setting(12, "number of transformer blocks", ge=1, le=4096)
    num_heads: int = setting(6, "attention heads; must divide dim", ge=1, le=65536)
    patch_size: int = setting(2, "side of the square patch that becomes one token, in pixels or latents", ge=1, le=1024)
    patch_bottleneck: int = setting(
        0, "channels between two linear maps that embed a patch, the first without a bias; 0: one map", ge=0, le=65536,
        applies=_PLAIN,
    )  # fmt: skip
    mlp: Literal["gelu", "swiglu", "swiglu_bias"] = setting("gelu", "feed-forward layer of a block; swiglu: without biases")
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
    value_residual: bool = setting(
        False, "mix the first block's values into those of each later block, by a learned share that begins at 1/2",
        applies=_ONE_EMBEDDING,
    )  # fmt: skip
    attention_bias: bool = setting(True, "biases in the attention projections", applies=_PLAIN)
    position: Literal["sincos", "rotary", "sincos_rotary"] = setting(
        "sincos", "fixed 2-D sine-cosine table added to the tokens, 2-D rotary embedding of queries and keys, or both"
    )
    timestep_frequencies: Literal["dit", "diffusers", "fourier"] = setting(
        "dit", "frequencies of the timestep's sinusoid: 10000^(-i / 128) for i = 0..127, diffusers' 10000^(-i / 127), or "
        "fourier: 256 random ones, saved with the weights"
    )
    embedding_per_block: bool = setting(
        False, "separate embeddings of timestep and class in each block, as diffusers trains them", applies=_PLAIN
    )
    final_modulation: bool = setting(True, "adaLN shift and scale before the output layer", applies=_PLAIN)
    label_dropout: float = setting(
        0.1, "probability of replacing the class by the null class in training, for guidance", ge=0, lt=1
    )
    class_tokens: int = setting(
        0, "tokens of the class, each with a learned position, that join those of the image; 0: none", ge=0, le=65536,
        applies=_ONE_EMBEDDING,
    )  # fmt: skip
    class_tokens_start: int = setting(
        0, "blocks before the tokens of the class join", ge=0, applies={"class_tokens": ">0"}
    )
    learned_variance: bool = setting(False, "twice the output channels: prediction and variance interpolation")
    num_predictions: int = setting(
        1, "images that the network predicts for each input; one for each of objective.heads, which set it", ge=1
    )
    duration_embedding: bool = setting(False, "second time as an input; set by objectives of two times", applies=_ONE_EMBEDDING)
    guidance_embedding: bool = setting(
        False, "guidance scale and interval as inputs; set by objective.guidance_max", applies=_ONE_EMBEDDING
    )
    intermediate_head: int | None = setting(
        None, "number of blocks before a second output layer, which is trained on the same target as the last one, for "
        "sampling with --guide head", ge=1, applies=_ONE_EMBEDDING | {"learned_variance": (False,)},
    )  # fmt: skip

    wide_dim: int = setting(
        0, "width of a second stream of blocks, modulated for each token by the output of the first; 0: none",
        ge=0, le=65536, applies=_ONE_EMBEDDING,
    )  # fmt: skip
    wide_layers: int = setting(2, "number of blocks of the second stream", ge=1, le=4096, applies={"wide_dim": ">0"})
    wide_heads: int = setting(
        16, "attention heads of the second stream; must divide wide_dim", ge=1, le=65536, applies={"wide_dim": ">0"}
    )
    mup_base_dim: int | None = setting(
        None, "width at which initial weights and learning rates of the maximal update parametrisation are the ordinary ones; "
        "default: no such parametrisation", ge=8, le=65536, applies=_ONE_EMBEDDING | {"wide_dim": (0,)},
    )  # fmt: skip
    mup_base_heads: int | None = setting(
        None, "attention heads at that width, where heads grow instead of their number", ge=1, applies={"mup_base_dim": "set"}
    )
    routing: RoutingConfig = choice(Choice(ROUTINGS, "none"), "blocks that see a part of the tokens in training")

    @property
    def width_ratio(self) -> float:
        """Width over the base's of the maximal update parametrisation; 1 without it."""
        return self.dim / self.mup_base_dim if self.mup_base_dim else 1.0

    @property
    def score_scale(self) -> float | None:
        """Factor on attention's scores, where it is not 1 / sqrt(channels of a head)."""
        if not (self.mup_base_dim and self.mup_base_heads):
            return None
        base, channels = self.mup_base_dim / self.mup_base_heads, self.dim / self.num_heads
        return None if base == channels else base**0.5 / channels

    @property
    def head_width(self) -> int | None:
        widths = {self.dim // self.num_heads} | ({self.wide_dim // self.wide_heads} if self.wide_dim else set())
        return widths.pop() if len(widths) == 1 else None

    @property
    def depth(self) -> int:
        return self.num_layers + (self.wide_layers if self.wide_dim else 0)

    def of_depth(self, depth: int) -> "DiTConfig | None":
        alike = not (self.intermediate_head or self.class_tokens or self.wide_dim or self.value_residual or self.routed_blocks)
        return replace(self, num_layers=depth) if alike else None

    @property
    def normalizes_weights(self) -> bool:
        return self.magnitude_preserving

    @property
    def routed_blocks(self) -> range:
        return self.routing.span(self.num_layers)


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


def _jit(size: str, patch_size: int, dim: int, num_layers: int, num_heads: int, bottleneck: int, start: int) -> DiTConfig:
    return DiTConfig(
        flavor=f"JiT-{size}/{patch_size}", dim=dim, num_layers=num_layers, num_heads=num_heads, patch_size=patch_size,
        patch_bottleneck=bottleneck, mlp="swiglu_bias", mlp_hidden_dim=8 * dim // 3, norm="rmsnorm", norm_affine=True,
        qk_norm=True, position="sincos_rotary", class_tokens=32, class_tokens_start=start,
    )  # fmt: skip


def _dit_dh(size: str, dim: int, num_layers: int, num_heads: int) -> DiTConfig:
    return DiTConfig(
        flavor=f"DiT-DH-{size}/1", dim=dim, num_layers=num_layers, num_heads=num_heads, patch_size=1, mlp="swiglu_bias",
        mlp_hidden_dim=8 * dim // 3, norm="rmsnorm", norm_affine=True, position="sincos_rotary",
        timestep_frequencies="fourier", wide_dim=2048,
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
    # Li and He, "Back to basics: let denoising generative models denoise", arXiv 2511.13720; H without its dropout of 0.2.
    "JiT-B/16": _jit("B", 16, 768, 12, 12, 128, 4),
    "JiT-B/32": _jit("B", 32, 768, 12, 12, 128, 4),
    "JiT-L/16": _jit("L", 16, 1024, 24, 16, 128, 8),
    "JiT-H/16": _jit("H", 16, 1280, 32, 16, 256, 10),
    # Zheng et al., "Diffusion transformers with representation autoencoders", arXiv 2510.11690, for latents of 16 x 16.
    "DiT-DH-S/1": _dit_dh("S", 384, 12, 6),
    "DiT-DH-XL/1": _dit_dh("XL", 1152, 28, 16),
    "digits": replace(_SMALL, flavor="digits", dim=192, num_layers=6, num_heads=6, mlp_hidden_dim=512),
    "cifar": replace(_SMALL, flavor="cifar", dim=384, num_layers=12, num_heads=6, mlp_hidden_dim=1024),
    "debug": replace(_SMALL, flavor="debug", dim=64, num_layers=3, num_heads=4, mlp_hidden_dim=128),
}


def problems(config: DiTConfig, image_shape: tuple[int, int, int]) -> list[str]:
    """Problems of this model with images (C, H, W): one line each, empty if it can be built."""
    found = []
    _, height, width = image_shape
    if height % config.patch_size or width % config.patch_size:
        found.append(f"model.patch_size: {config.patch_size} does not divide the image of {height} x {width}")
    if config.dim % config.num_heads:
        found.append(f"model.num_heads: {config.num_heads} does not divide model.dim = {config.dim}")
    elif config.position != "sincos" and config.dim // config.num_heads % 4:
        head_dim = config.dim // config.num_heads
        found.append(f"model.num_heads: heads of {head_dim} channels; rotary embedding needs a multiple of 4")
    if config.position != "rotary" and config.dim % 4:
        found.append(f"model.dim: {config.dim} is no multiple of 4, as the sincos position table needs")
    if (tokens := height * width // config.patch_size**2) > MOST_TOKENS:
        most = f"at most {MOST_TOKENS} can be"
        found.append(f"model.patch_size: {config.patch_size} makes {tokens} tokens of an image, {most}")
    if config.intermediate_head and config.intermediate_head >= config.num_layers:
        most = f"at most model.num_layers - 1 = {config.num_layers - 1}"
        found.append(f"model.intermediate_head: {config.intermediate_head} leaves no block behind it ({most})")
    if config.class_tokens and config.class_tokens_start >= config.num_layers:
        most = f"at most model.num_layers - 1 = {config.num_layers - 1}"
        found.append(f"model.class_tokens_start: {config.class_tokens_start} leaves no block for them ({most})")
    if config.magnitude_preserving and config.mlp == "swiglu_bias":
        found.append("model.mlp: swiglu_bias has biases, and model.magnitude_preserving none (use swiglu)")
    if config.mup_base_dim and config.mup_base_heads and config.mup_base_dim % config.mup_base_heads:
        found.append(f"model.mup_base_heads: {config.mup_base_heads} does not divide model.mup_base_dim = {config.mup_base_dim}")
    found += _wide_problems(config) + _routing_problems(config)
    of_block = config.dim * (10 * config.dim + 2 * config.mlp_hidden_dim)
    if config.num_layers * of_block > MOST_PARAMETERS:
        blocks = f"{config.num_layers} blocks of about {of_block:.1g} parameters"
        found.append(f"model.num_layers: {blocks} are more than {MOST_PARAMETERS:.0e} (lower it, or model.dim)")
    return found


def _wide_problems(config: DiTConfig) -> list[str]:
    if not config.wide_dim:
        return []
    if config.wide_dim % config.wide_heads:
        return [f"model.wide_heads: {config.wide_heads} does not divide model.wide_dim = {config.wide_dim}"]
    width = config.wide_dim // config.wide_heads
    if config.position != "sincos" and width % 4:
        return [f"model.wide_heads: heads of {width} channels; rotary embedding needs a multiple of 4"]
    of_block = config.wide_dim * (10 * config.wide_dim + 2 * config.mlp_hidden_dim * config.wide_dim // config.dim)
    if config.wide_layers * of_block > MOST_PARAMETERS:
        blocks = f"{config.wide_layers} blocks of about {of_block:.1g} parameters"
        return [f"model.wide_layers: {blocks} are more than {MOST_PARAMETERS:.0e} (lower it, or model.wide_dim)"]
    return []


def _routing_problems(config: DiTConfig) -> list[str]:
    routing, key = config.routing, "model.routing"
    if routing.name == "none":
        return []
    blocks = config.routed_blocks
    if not blocks or blocks[-1] > config.num_layers:
        text = f"{blocks.stop - 1} is no block from {key}.first_block = {blocks.start} to model.num_layers = {config.num_layers}"
        return [f"{key}.last_block: {text} (give one)"]
    for name in ("magnitude_preserving", "embedding_per_block", "class_tokens", "wide_dim"):
        if getattr(config, name):
            off = "false" if getattr(config, name) is True else "0"
            return [f"{key}.name: {routing.name} is for a network without model.{name} (set that to {off}, or this to none)"]
    if config.value_residual and blocks[0] == 1:
        return [f"{key}.first_block: all tokens need values of the first block, by model.value_residual (set it above 1)"]
    if config.intermediate_head and config.intermediate_head in blocks[:-1]:
        text = f"{config.intermediate_head} is a block with a part of the tokens, by {key}"
        return [f"model.intermediate_head: {text} (set it below {blocks[0]}, or to {blocks[-1]} or above)"]
    return []


def condition_problems(config: DiTConfig, kind: ConditionKind) -> list[str]:
    """Problems of this model with a kind of condition: one line each."""
    if config.class_tokens and not isinstance(kind, Classes):
        return ["model.class_tokens: the data have no classes, whose tokens they would be (set it to 0)"]
    return []
