"""Diffusion transformer; below it block, output layer, embeddings and the fixed tables.

B images, T = (H / p)(W / p) tokens of width D, N heads of width D / N, patches of side p.

Source: Peebles and Xie, "Scalable Diffusion Models with Transformers", arXiv 2212.09748.
"""

import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan.conditions import Classes, Condition, ConditionKind
from torchtitan.models.base import DiffusionModel, LinearRole, ProbePoint, TokenExchange
from torchtitan.models.dit.config import DiTConfig, condition_problems, problems
from torchtitan.models.dit.initial_weights import SCALARS, initialise
from torchtitan.models.dit.positions import rotary_table, sincos_table
from torchtitan.models.layers import (
    SINUSOID_CHANNELS,
    FourierFeatures,
    LayerNorm,
    RMSNorm,
    TokenBias,
    TokenGain,
    VectorEmbedding,
    check_inputs,
    modulate,
    patchify,
    rotate,
    timestep_sinusoid,
    unpatchify,
)
from torchtitan.models.magnitude import MPLinear


class PatchTransformer(DiffusionModel):
    """Transformer over the patches of images of one fixed shape, square or not: the parts that DiT and its variants share.

    Args:
        config: a row of FLAVORS, or any other choice of its fields.
        condition_kind: K classes or nothing; class K is the null class, which callers pass where a label is dropped.

    Raises:
        ValueError: the config's fields do not fit together or do not fit the image.

    Attributes:
        position: table added to the tokens [T, D], or None.
        rotary: table of rotations [2, T, D / N / 2], or None; before them those of the tokens of the class, which rotate
            nothing.
        guidance: scale, and lowest and highest time with it [3], float32, where they are inputs and not given; or None.
    """

    layers: nn.ModuleList
    position: Tensor | None
    rotary: Tensor | None
    guidance: Tensor | None

    def __init__(self, config: DiTConfig, image_shape: tuple[int, int, int], condition_kind: ConditionKind) -> None:
        super().__init__()
        if found := [*problems(config, image_shape), *condition_problems(config, condition_kind)]:
            raise ValueError("; ".join(found))
        self.config = config
        self.condition_kind = condition_kind
        channels, height, width = self.image_shape = (image_shape[0], image_shape[1], image_shape[2])
        self.grid = (height // config.patch_size, width // config.patch_size)
        self.out_channels = (2 if config.learned_variance else config.num_predictions) * channels
        patch_channels = self.out_channels * config.patch_size**2
        self.patch_channels = patch_channels  # of each output layer
        if config.intermediate_head:
            self.out_channels *= 2
        # Functions of the shape alone: filled by init_buffers, in no checkpoint, float32 whatever the weights are.
        num_tokens = self.grid[0] * self.grid[1]
        position, rotary = None, None
        if config.position != "rotary":
            position = torch.empty(num_tokens, config.dim, dtype=torch.float32)
        if config.position != "sincos":
            rotary = torch.empty(2, config.class_tokens + num_tokens, config.dim // config.num_heads // 2, dtype=torch.float32)
        self.register_buffer("position", position, persistent=False)
        self.register_buffer("rotary", rotary, persistent=False)
        guidance = torch.empty(3, dtype=torch.float32) if config.guidance_embedding else None
        self.register_buffer("guidance", guidance, persistent=False)
        self._exchange: TokenExchange | None = None

    def forward(
        self, x: Tensor, t: Tensor, condition: Condition = None, duration: Tensor | None = None, guidance: Tensor | None = None
    ) -> Tensor:
        check_inputs(self, x, condition)
        x, position = patchify(x, self.config.patch_size), self.position  # [B, T, C p p], [T, D]
        exchange = self._exchange if self.training else None
        if exchange is not None:
            x, position = exchange.split(x), None if position is None else exchange.split(position[None])[0]
        x = self.transform(x, position, t, condition, duration, guidance)  # [B, T, C_out p p]
        if exchange is not None:
            x = exchange.gather(x)
        x = unpatchify(x, self.grid, self.config.patch_size)  # [B, C_out, H, W]
        return x.to(torch.promote_types(x.dtype, torch.float32))

    def split_tokens(self, exchange: TokenExchange) -> None:
        self._exchange = exchange
        for block in self.blocks():
            cast(Any, block).attention.exchange = exchange

    def transform(
        self, patches: Tensor, position: Tensor | None, t: Tensor, condition: Condition, duration: Tensor | None,
        guidance: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """Apply to patches [B, T, C p p], [B, T, C_out p p]; position: the table's rows for these [T, D], if any."""
        raise NotImplementedError

    def init_buffers(self) -> None:
        if self.position is not None:
            self.position.copy_(sincos_table(self.config.dim, self.grid))
        if self.rotary is not None:
            head_dim = self.config.dim // self.config.num_heads
            count = self.config.class_tokens
            self.rotary[0, :count], self.rotary[1, :count] = 1.0, 0.0
            self.rotary[:, count:] = rotary_table(head_dim, self.grid)
        self.set_guidance(None)

    def set_guidance(self, scale: float | None, interval: tuple[float, float] = (0.0, 1.0)) -> None:
        if self.guidance is not None:
            given = (self.config.guidance, 0.0, 1.0) if scale is None else (scale, *interval)
            self.guidance.copy_(torch.tensor(given, dtype=torch.float32))

    def blocks(self) -> list[nn.Module]:
        return list(self.layers)

    def probe_points(self) -> dict[str, ProbePoint]:
        return {
            f"block_{number + 1}": ProbePoint(f"layers.{number}", 2, self._class_tokens_in(number))
            for number in range(len(self.layers))
        }

    def linear_roles(self) -> dict[str, LinearRole]:
        def role(name: str) -> LinearRole:
            if any(f"{each}_embed" in name for each in (*SCALARS, "label")) or name.endswith("modulation"):
                return "vector"
            narrow = name.startswith("patch_embed") or name in ("output.linear", "intermediate.linear")
            return "small" if narrow else "token"

        return {name: role(name) for name, module in self.named_modules() if isinstance(module, nn.Linear | MPLinear)}

    def tokens_per_image(self, image_shape: tuple[int, int, int]) -> int:
        _, height, width = image_shape
        return (height // self.config.patch_size) * (width // self.config.patch_size)

    def attention_macs(self, num_tokens: int) -> int:
        # Not causal: every token meets every other one, in the scores and again in the weighted sum of the values.
        tokens = (num_tokens + self._class_tokens_in(number) for number in range(self.config.num_layers))
        return sum(2 * count**2 * self.config.dim for count in tokens)

    def applications(self, image_shape: tuple[int, int, int]) -> dict[str, int]:
        roles, found = self.linear_roles(), super().applications(image_shape)
        for number in range(self.config.num_layers):
            for name in found:
                if roles[name] == "token" and name.startswith(f"layers.{number}."):
                    found[name] += self._class_tokens_in(number)
        return found

    def _class_tokens_in(self, number: int) -> int:
        """Tokens of the class in a block, counted from 0."""
        return self.config.class_tokens if number >= self.config.class_tokens_start else 0


class DiT(PatchTransformer):
    """Diffusion transformer with adaLN-Zero blocks; the class table has a row for each class and one for the null class.

    Timestep and class have one embedding for all blocks, or one in each (`embedding_per_block`). The output of an
    intermediate head stands behind the last layer's, in the second half of the channels. Source: "Guiding a diffusion
    transformer with the internal dynamics of itself", arXiv 2512.24176.
    """

    def __init__(self, config: DiTConfig, image_shape: tuple[int, int, int], condition_kind: ConditionKind) -> None:
        super().__init__(config, image_shape, condition_kind)
        channels = image_shape[0] * config.patch_size**2
        if config.patch_bottleneck:
            self.patch_embed: nn.Module = BottleneckEmbedding(channels, config.patch_bottleneck, config.dim)
        else:
            self.patch_embed = nn.Linear(channels, config.dim)
        num_labels = condition_kind.count + 1 if isinstance(condition_kind, Classes) else 0
        if config.embedding_per_block:
            self.layers = nn.ModuleList(EmbeddingBlock(config, num_labels) for _ in range(config.num_layers))
        else:
            if config.timestep_frequencies == "fourier":
                self.waves = FourierFeatures(SINUSOID_CHANNELS)
            channels = SINUSOID_CHANNELS * (2 if config.timestep_frequencies == "fourier" else 1)
            self.time_embed = VectorEmbedding(channels, config.dim)
            self.label_embed = nn.Embedding(num_labels, config.dim) if num_labels else None
            self.layers = nn.ModuleList(Block(config, number) for number in range(config.num_layers))
        self.class_tokens = TokenBias(config.class_tokens, config.dim) if config.class_tokens else None
        self.duration_embed = VectorEmbedding(channels, config.dim) if config.duration_embedding else None
        self.guidance_embed = VectorEmbedding(3 * channels, config.dim) if config.guidance_embedding else None
        self.output = OutputLayer(config, self.patch_channels)
        self.intermediate = OutputLayer(config, self.patch_channels) if config.intermediate_head else None

    def transform(
        self, patches: Tensor, position: Tensor | None, t: Tensor, condition: Condition, duration: Tensor | None,
        guidance: Tensor | None,
    ) -> Tensor:  # fmt: skip
        x = self.embed_patches(patches, position)  # [B, T, D]
        if self.config.embedding_per_block:
            return self.output(*self._embedding_blocks(x, self.time_features(t), condition))
        time, label, c = self.embed_conditions(t, condition, duration, guidance)
        x, early = self.apply_blocks(x, c, label)
        x = self.read_out(patches, x, time, c)  # [B, T, C_out p p]
        return x if early is None else torch.cat((x, early), dim=-1)

    def embed_patches(self, patches: Tensor, position: Tensor | None) -> Tensor:
        """Embed patches [B, T, C p p] at the table's positions: [B, T, D]."""
        first: Any = self.patch_embed.reduce if self.config.patch_bottleneck else self.patch_embed
        x = self.patch_embed(patches.to(first.weight.dtype))
        return x if position is None else x + position.to(x.dtype)

    def embed_conditions(
        self, t: Tensor, condition: Condition, duration: Tensor | None = None, guidance: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Embed time and class, [B, D] each, None without classes; and the conditioning vector of both [B, D].

        t: [B]; of a network with no other options also by token [B, T], and so is then the vector [B, T, D].
        duration, guidance: added to the time, where they are embedded, the scale s of the guidance as 1 - 1 / s; None: as
            `ModelConfig` says.
        """
        time, label = self.time_embed(self.time_features(t)), None
        if self.duration_embed is not None:
            time = time + self.duration_embed(self.time_features(torch.zeros_like(t) if duration is None else duration))
        if self.guidance_embed is not None and self.guidance is not None:
            scale, low, high = (self.guidance.expand(len(t), 3) if guidance is None else guidance).to(t).unbind(1)  # [B] each
            features = [self.time_features(each) for each in (1.0 - 1.0 / scale, low, high)]
            time = time + self.guidance_embed(torch.cat(features, dim=-1))
        if self.label_embed is not None:
            label = self.label_embed(condition)
            label = label if t.ndim == 1 else label[:, None]
        return time, label, F.silu(time if label is None else time + label)

    def time_features(self, t: Tensor) -> Tensor:
        """Features of times [B], [B, 256] or Fourier features [B, 512]."""
        if self.config.timestep_frequencies == "fourier":
            return self.waves(t)
        return timestep_sinusoid(t, SINUSOID_CHANNELS, reach_lowest=self.config.timestep_frequencies == "diffusers")

    def read_out(self, patches: Tensor, x: Tensor, time: Tensor, c: Tensor) -> Tensor:
        """Read patches [B, T, C_out p p] off the last block's tokens [B, T, D]; patches: those of the input."""
        return self.output(x, c)

    def apply_blocks(self, x: Tensor, c: Tensor, label: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Apply the blocks to tokens [B, T, D], and the intermediate head behind its block [B, T, C p p], if there is one.

        c: conditioning vector [B, D]; label: embedding of the class [B, D].
        """
        count, joined, early = self.config.class_tokens, 0, None
        rotary = self.rotary[:, count:] if count and self.rotary is not None else self.rotary
        values: tuple[Tensor, ...] = ()  # the first ones of each token, where later blocks mix them into theirs
        for number, block in enumerate(self.layers):
            if self.class_tokens is not None and label is not None and number == self.config.class_tokens_start:
                x = torch.cat((self.class_tokens(label[:, None].expand(-1, count, -1)), x), dim=1)  # [B, n + T, D]
                rotary, joined = self.rotary, count
            x = block(x, c, rotary, *values)
            if isinstance(x, tuple):
                x, first = x
                values = (first,)
            if self.intermediate is not None and number + 1 == self.config.intermediate_head:
                early = self.intermediate(x[:, joined:] if joined else x, c)
        return x[:, joined:] if joined else x, early

    def _embedding_blocks(self, x: Tensor, sinusoid: Tensor, condition: Condition) -> tuple[Tensor, Tensor]:
        """Apply blocks with separate embeddings; return tokens [B, T, D] and the first block's conditioning vector [B, D]."""
        vectors = []
        for block in self.layers:
            x, c = block(x, sinusoid, condition, self.rotary)  # [B, T, D], [B, D]
            vectors.append(c)
        return x, vectors[0]

    def init_weights(self) -> None:
        self.init_buffers()
        initialise(self, self.config)

    def fan_in_ratios(self) -> dict[str, float]:
        if not self.config.mup_base_dim:
            return {}
        from torchtitan.models.dit.width import fan_in_ratios

        return fan_in_ratios(self, self.config)

    def introduction(self, steps: int) -> Iterator[tuple[int, str]]:
        base, dim, hidden = self.config.mup_base_dim, self.config.dim, self.config.mlp_hidden_dim
        if base:
            found = f"width {base} with a feed-forward of {hidden / self.config.width_ratio:g}"
            yield logging.INFO, f"maximal updates: rates and initial weights of {found} are scaled to {dim} with {hidden}"


class BottleneckEmbedding(nn.Module):
    """Embedding of patches through fewer channels. Source: Li and He, arXiv 2511.13720, section 4.2."""

    def __init__(self, channels: int, bottleneck: int, dim: int) -> None:
        super().__init__()
        self.reduce = nn.Linear(channels, bottleneck, bias=False)
        self.expand = nn.Linear(bottleneck, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.expand(self.reduce(x))


class Block(nn.Module):
    """Transformer block of which shifts, scales and gates come from a conditioning vector (adaLN-Zero)."""

    def __init__(self, config: DiTConfig, number: int = 0) -> None:
        """number: of the block, from 0."""
        super().__init__()
        self.attention_norm = _norm(config, config.norm_eps)
        self.attention = Attention(config, number)
        self.mlp_norm = _norm(config, config.mlp_norm_eps or config.norm_eps)
        self.mlp = MLPS[config.mlp](config.dim, config.mlp_hidden_dim)
        self.modulation = nn.Linear(config.dim, 6 * config.dim)

    def forward(
        self, x: Tensor, c: Tensor, rotary: Tensor | None, first_values: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Apply the block.

        Args:
            x: tokens [B, T, D].
            c: conditioning vector [B, D], or one of each token [B, T, D].
            rotary: table [2, T, D / N / 2] or None.
            first_values: of earlier blocks, see `Attention`.

        Returns:
            tokens [B, T, D]; and the first values of all of these, from a block that has new ones.
        """
        modulation = _of_tokens(self.modulation(c)).chunk(6, dim=-1)  # six of [B, 1, D], or [B, T, D]
        attention_shift, attention_scale, attention_gate, mlp_shift, mlp_scale, mlp_gate = modulation
        h = modulate(self.attention_norm(x), attention_shift, attention_scale)
        attended, values = self.attention(h, rotary, first_values), None
        if isinstance(attended, tuple):
            attended, values = attended
        x = torch.addcmul(x, attention_gate, attended)
        h = modulate(self.mlp_norm(x), mlp_shift, mlp_scale)
        x = torch.addcmul(x, mlp_gate, self.mlp(h))  # [B, T, D]
        return x if values is None else (x, values)


class EmbeddingBlock(Block):
    """Transformer block that embeds timestep and class itself.

    Source: `DiTTransformer2DModel` of diffusers. The output layer there uses the first block's embedding.
    """

    def __init__(self, config: DiTConfig, num_labels: int) -> None:
        """num_labels: rows of the class table, the null class's included; 0: there are no classes."""
        super().__init__(config)
        self.time_embed = VectorEmbedding(SINUSOID_CHANNELS, config.dim)
        self.label_embed = nn.Embedding(num_labels, config.dim) if num_labels else None

    def forward(  # type: ignore[override]  # makes the conditioning vector instead of taking it
        self, x: Tensor, sinusoid: Tensor, condition: Tensor | None, rotary: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Apply the block: tokens [B, T, D], and the block's conditioning vector [B, D]."""
        c = self.time_embed(sinusoid)
        if self.label_embed is not None:
            c = c + self.label_embed(condition)
        c = F.silu(c)
        return cast(Tensor, super().forward(x, c, rotary)), c


class OutputLayer(nn.Module):
    """Norm, adaLN shift and scale if wanted, and the projection of tokens to patches."""

    def __init__(self, config: DiTConfig, patch_channels: int) -> None:
        super().__init__()
        self.norm = _norm(config, config.norm_eps)
        self.modulation = nn.Linear(config.dim, 2 * config.dim) if config.final_modulation else None
        self.linear = nn.Linear(config.dim, patch_channels)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        x = self.norm(x)
        if self.modulation is not None:
            shift, scale = _of_tokens(self.modulation(c)).chunk(2, dim=-1)  # two of [B, 1, D], or [B, T, D]
            x = modulate(x, shift, scale)
        return self.linear(x)  # [B, T, C_out p p]


class Attention(nn.Module):
    """Multi-head self-attention over all tokens.

    With `value_residual` the values v of each block but the first become v + share (v1 - v), v1 the first values of a token:
    those of the first block that it passes. Source: Zhou et al., "Value residual learning", arXiv 2410.17897; here one learned
    share for each block.
    """

    def __init__(self, config: DiTConfig, number: int = 0) -> None:
        """number: of the block, from 0."""
        super().__init__()
        self.num_heads, self.score_scale = config.num_heads, config.score_scale
        self.value_share = TokenGain(1) if config.value_residual and number else None
        newcomers = number == 0 or (config.class_tokens > 0 and number == config.class_tokens_start)
        self.gives_values = config.value_residual and newcomers
        self.qkv = nn.Linear(config.dim, 3 * config.dim, bias=config.attention_bias)
        self.out = nn.Linear(config.dim, config.dim, bias=config.attention_bias)
        head_dim = config.dim // config.num_heads
        self.q_norm = RMSNorm(head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(head_dim, config.norm_eps) if config.qk_norm else None
        self.exchange: TokenExchange | None = None

    def forward(
        self, x: Tensor, rotary: Tensor | None, first_values: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, -1))  # [B, T, 3, N, D / N]
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each [B, N, T, D / N]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        first = v
        if self.value_share is not None and first_values is not None:
            first, joined = first_values, v.shape[2] - first_values.shape[2]
            if joined:  # tokens of the class stand before the others
                first = torch.cat((v[:, :, :joined], first), dim=2)
            v = v + self.value_share(first - v)
        exchange = self.exchange if self.training else None
        x = self.out(attend(q, k, v, rotary, exchange, self.score_scale))  # [B, T, D]
        return (x, first.clone()) if self.gives_values else x  # no view, of which FSDP2 warns


class GeluMLP(nn.Module):
    """Linear, GELU in its tanh form, linear."""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(dim, hidden_dim)
        self.out = nn.Linear(hidden_dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.gelu(self.hidden(x), approximate="tanh"))


class SwiGLU(nn.Module):
    """Feed-forward out(silu(gate x) * (up x)); gate and up are packed in one linear.

    Source: Shazeer, "GLU variants improve transformer", arXiv 2002.05202, equation 6.
    """

    def __init__(self, dim: int, hidden_dim: int, bias: bool = False) -> None:
        super().__init__()
        self.gate_up = nn.Linear(dim, 2 * hidden_dim, bias=bias)
        self.out = nn.Linear(hidden_dim, dim, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)  # each [B, T, hidden_dim]
        return self.out(F.silu(gate) * up)


MLPS: dict[str, Callable[[int, int], nn.Module]] = {
    "gelu": GeluMLP, "swiglu": SwiGLU, "swiglu_bias": partial(SwiGLU, bias=True),
}  # fmt: skip


def attend(
    q: Tensor, k: Tensor, v: Tensor, rotary: Tensor | None, exchange: TokenExchange | None = None, scale: float | None = None
) -> Tensor:
    """Attend to all tokens: queries and keys [B, N, T, D / N], rotated by the table if there is one, to values; [B, T, D].

    Where processes have some of the tokens each, they exchange them for all tokens of some heads.

    scale: factor on the scores; None: 1 / sqrt(D / N).
    """
    if exchange is not None:
        q, k, v = exchange.all_tokens_of_own_heads(torch.stack((q, k, v))).unbind(0)
    if rotary is not None:
        q, k = rotate(q, rotary).to(v.dtype), rotate(k, rotary).to(v.dtype)
    x = F.scaled_dot_product_attention(q, k, v, scale=scale)  # [B, N, T, D / N]
    if exchange is not None:
        x = exchange.own_tokens_of_all_heads(x)
    return x.transpose(1, 2).flatten(2)


def _of_tokens(modulation: Tensor) -> Tensor:
    """View what is alike for all tokens of an image, [B, D], as [B, 1, D]."""
    return modulation if modulation.ndim == 3 else modulation[:, None]


def _norm(config: DiTConfig, eps: float) -> nn.Module:
    if config.norm == "rmsnorm":
        return RMSNorm(config.dim, eps, config.norm_affine)
    return LayerNorm(config.dim, eps, config.norm_affine)
