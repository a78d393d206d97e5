"""Diffusion transformer.

Source: Peebles and Xie, "Scalable Diffusion Models with Transformers", arXiv 2212.09748.
"""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan.conditions import Classes, Condition, ConditionKind
from torchtitan.models.base import DiffusionModel, LinearRole, ProbePoint, TokenExchange
from torchtitan.models.dit.config import DiTConfig
from torchtitan.models.dit.layers import (
    Block,
    EmbeddingBlock,
    OutputLayer,
    TimestepEmbedding,
    rotary_table,
    sincos_table,
)
from torchtitan.models.layers import (
    SINUSOID_CHANNELS,
    RMSNorm,
    check_inputs,
    patchify,
    timestep_sinusoid,
    unpatchify,
)
from torchtitan.models.magnitude import MPLinear

# What no machine holds, and products of which fit in 64 bits.
MOST_TOKENS, MOST_PARAMETERS = 2**24, 10**13


class PatchTransformer(DiffusionModel):
    """Transformer over the patches of images of one fixed shape, square or not: the parts that DiT and its variants share.

    Args:
        config: a row of FLAVORS, or any other choice of its fields.
        image_shape: (C, H, W) of the input.
        condition_kind: K classes or nothing; the class K is the null class: whoever calls the model passes it where a
            label is dropped.

    Raises:
        ValueError: the config's fields do not fit together or do not fit the image.

    Attributes:
        layers: the blocks.
        position: table added to the tokens [T, D], or None.
        rotary: table of rotations [2, T, D / N / 2], or None.
    """

    layers: nn.ModuleList
    position: Tensor | None
    rotary: Tensor | None

    def __init__(self, config: DiTConfig, image_shape: tuple[int, int, int], condition_kind: ConditionKind) -> None:
        super().__init__()
        if found := problems(config, image_shape):
            raise ValueError("; ".join(found))
        self.config = config
        self.condition_kind = condition_kind
        channels, height, width = self.image_shape = (image_shape[0], image_shape[1], image_shape[2])
        self.grid = (height // config.patch_size, width // config.patch_size)
        self.out_channels = (2 if config.learned_variance else config.num_predictions) * channels
        # Functions of the shape alone: filled by init_buffers, in no checkpoint, float32 whatever the weights are.
        num_tokens = self.grid[0] * self.grid[1]
        position, rotary = None, None
        if config.position == "sincos":
            position = torch.empty(num_tokens, config.dim, dtype=torch.float32)
        else:
            rotary = torch.empty(2, num_tokens, config.dim // config.num_heads // 2, dtype=torch.float32)
        self.register_buffer("position", position, persistent=False)
        self.register_buffer("rotary", rotary, persistent=False)
        self._exchange: TokenExchange | None = None

    def forward(self, x: Tensor, t: Tensor, condition: Condition = None) -> Tensor:
        check_inputs(self, x, condition)
        x = patchify(x, self.config.patch_size)  # [B, T, C p p]
        exchange = self._exchange if self.training else None
        if exchange is not None:
            x = exchange.split(x)
        x = self.transform(x, t, condition)  # [B, T, C_out p p]
        if exchange is not None:
            x = exchange.gather(x)
        x = unpatchify(x, self.grid, self.config.patch_size)  # [B, C_out, H, W]
        return x.to(torch.promote_types(x.dtype, torch.float32))

    def split_tokens(self, exchange: TokenExchange) -> None:
        self._exchange = exchange
        for block in self.layers:
            cast(Any, block).attention.exchange = exchange

    def own_position(self) -> Tensor | None:
        """Rows of the table that is added to the tokens, of those that this process has; None if there is no table."""
        if self.position is None or self._exchange is None or not self.training:
            return self.position
        return self._exchange.split(self.position[None])[0]

    def transform(self, patches: Tensor, t: Tensor, condition: Condition) -> Tensor:
        """Apply the network to patches [B, T, C p p] of images, [B, T, C_out p p]; t and condition as of `forward`."""
        raise NotImplementedError

    def init_buffers(self) -> None:
        if self.position is not None:
            self.position.copy_(sincos_table(self.config.dim, self.grid))
        if self.rotary is not None:
            head_dim = self.config.dim // self.config.num_heads
            self.rotary.copy_(rotary_table(head_dim, self.grid))

    def blocks(self) -> list[nn.Module]:
        return list(self.layers)

    def probe_points(self) -> dict[str, ProbePoint]:
        return {f"block_{number + 1}": ProbePoint(f"layers.{number}", 2) for number in range(len(self.layers))}

    def linear_roles(self) -> dict[str, LinearRole]:
        def role(name: str) -> LinearRole:
            if "time_embed" in name or "label_embed" in name or name.endswith("modulation"):
                return "vector"
            return "small" if name in ("patch_embed", "output.linear") else "token"

        return {name: role(name) for name, module in self.named_modules() if isinstance(module, nn.Linear | MPLinear)}

    def tokens_per_image(self, image_shape: tuple[int, int, int]) -> int:
        _, height, width = image_shape
        return (height // self.config.patch_size) * (width // self.config.patch_size)

    def attention_macs(self, num_tokens: int) -> int:
        # Not causal: every token meets every other one, in the scores and again in the weighted sum of the values.
        return self.config.num_layers * 2 * num_tokens**2 * self.config.dim


class DiT(PatchTransformer):
    """Diffusion transformer with adaLN-Zero blocks; the class table has a row for each class and one for the null class.

    Timestep and class have one embedding for all blocks, or one in each (`embedding_per_block`).
    """

    def __init__(self, config: DiTConfig, image_shape: tuple[int, int, int], condition_kind: ConditionKind) -> None:
        super().__init__(config, image_shape, condition_kind)
        self.patch_embed = nn.Linear(image_shape[0] * config.patch_size**2, config.dim)
        num_labels = condition_kind.count + 1 if isinstance(condition_kind, Classes) else 0
        if config.embedding_per_block:
            self.layers = nn.ModuleList(EmbeddingBlock(config, num_labels) for _ in range(config.num_layers))
        else:
            self.time_embed = TimestepEmbedding(config)
            self.label_embed = nn.Embedding(num_labels, config.dim) if num_labels else None
            self.layers = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.output = OutputLayer(config, self.out_channels * config.patch_size**2)

    def transform(self, patches: Tensor, t: Tensor, condition: Condition) -> Tensor:
        x = self.patch_embed(patches.to(self.patch_embed.weight.dtype))  # [B, T, D]
        if (position := self.own_position()) is not None:
            x = x + position.to(x.dtype)
        if self.config.embedding_per_block:
            return self.output(*self._embedding_blocks(x, t, condition))
        c = self.time_embed(t)  # [B, D]
        if self.label_embed is not None:
            c = c + self.label_embed(condition)
        c = F.silu(c)
        for block in self.layers:
            x = block(x, c, self.rotary)  # [B, T, D]
        return self.output(x, c)

    def _embedding_blocks(self, x: Tensor, t: Tensor, condition: Condition) -> tuple[Tensor, Tensor]:
        """Apply blocks with separate embeddings; return tokens [B, T, D] and the first block's conditioning vector [B, D]."""
        diffusers = self.config.timestep_frequencies == "diffusers"
        sinusoid = timestep_sinusoid(t, SINUSOID_CHANNELS, reach_lowest=diffusers)
        vectors = []
        for block in self.layers:
            x, c = block(x, sinusoid, condition, self.rotary)  # [B, T, D], [B, D]
            vectors.append(c)
        return x, vectors[0]

    def init_weights(self) -> None:
        """Initialise as in the paper, for every flavor: also TorchDiTan's, which were published with another scheme.

        A packed linear (queries, keys and values; gate and up) is drawn as one matrix.
        """
        self.init_buffers()
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.LayerNorm | RMSNorm) and module.weight is not None:
                nn.init.ones_(module.weight)

        for name, module in self.named_modules():
            embeds = name.endswith(("time_embed.hidden", "time_embed.out", "label_embed"))
            if embeds and isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

        # adaLN-Zero: every block starts as the identity, because its gates are zero.
        for name, module in self.named_modules():
            if name.endswith("modulation"):
                nn.init.zeros_(module.weight)
        # The first prediction is exactly zero.
        nn.init.zeros_(self.output.linear.weight)


def problems(config: DiTConfig, image_shape: tuple[int, int, int]) -> list[str]:
    """Problems of this model with images (C, H, W): one line each, empty if it can be built."""
    found = []
    _, height, width = image_shape
    if height % config.patch_size or width % config.patch_size:
        found.append(f"model.patch_size: {config.patch_size} does not divide the image of {height} x {width}")
    if config.dim % config.num_heads:
        found.append(f"model.num_heads: {config.num_heads} does not divide model.dim = {config.dim}")
    elif config.position == "rotary" and config.dim // config.num_heads % 4:
        head_dim = config.dim // config.num_heads
        found.append(f"model.num_heads: heads of {head_dim} channels; rotary embedding needs a multiple of 4")
    if config.position == "sincos" and config.dim % 4:
        found.append(f"model.dim: {config.dim} is no multiple of 4, as the sincos position table needs")
    if (tokens := height * width // config.patch_size**2) > MOST_TOKENS:
        most = f"at most {MOST_TOKENS} can be"
        found.append(f"model.patch_size: {config.patch_size} makes {tokens} tokens of an image, {most}")
    of_block = config.dim * (10 * config.dim + 2 * config.mlp_hidden_dim)
    if config.num_layers * of_block > MOST_PARAMETERS:
        blocks = f"{config.num_layers} blocks of about {of_block:.1g} parameters"
        found.append(f"model.num_layers: {blocks} are more than {MOST_PARAMETERS:.0e} (lower it, or model.dim)")
    return found
