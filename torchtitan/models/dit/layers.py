"""Layers of a diffusion transformer: block, output layer, embeddings, and the fixed tables.

B images, T = (H / p)(W / p) tokens of width D, N heads of width D / N, patches of side p.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan.models.base import TokenExchange
from torchtitan.models.dit.config import DiTConfig
from torchtitan.models.layers import SINUSOID_CHANNELS, LayerNorm, RMSNorm, modulate, timestep_sinusoid


class _AdaLNLayers(nn.Module):
    """Layers of a transformer block: their shift, scale and gate come from a conditioning vector (adaLN-Zero)."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.attention_norm = _norm(config, config.norm_eps)
        self.attention = Attention(config)
        self.mlp_norm = _norm(config, config.mlp_norm_eps or config.norm_eps)
        self.mlp = MLPS[config.mlp](config.dim, config.mlp_hidden_dim)
        self.modulation = nn.Linear(config.dim, 6 * config.dim)

    def _apply_layers(self, x: Tensor, c: Tensor, rotary: Tensor | None) -> Tensor:
        modulation = self.modulation(c)[:, None].chunk(6, dim=-1)  # six of [B, 1, D]
        attention_shift, attention_scale, attention_gate, mlp_shift, mlp_scale, mlp_gate = modulation
        h = modulate(self.attention_norm(x), attention_shift, attention_scale)
        x = torch.addcmul(x, attention_gate, self.attention(h, rotary))
        h = modulate(self.mlp_norm(x), mlp_shift, mlp_scale)
        return torch.addcmul(x, mlp_gate, self.mlp(h))  # [B, T, D]


class Block(_AdaLNLayers):
    """Transformer block that is given its conditioning vector."""

    def forward(self, x: Tensor, c: Tensor, rotary: Tensor | None) -> Tensor:
        """Apply the block. x: tokens [B, T, D]; c: conditioning vector [B, D]; rotary: table [2, T, D / N / 2] or None.
        """
        return self._apply_layers(x, c, rotary)


class EmbeddingBlock(_AdaLNLayers):
    """Transformer block that embeds timestep and class itself.

    Source: `DiTTransformer2DModel` of diffusers. The output layer there uses the first block's embedding.
    """

    def __init__(self, config: DiTConfig, num_labels: int) -> None:
        """num_labels: rows of the class table, the null class's included; 0: there are no classes."""
        super().__init__(config)
        self.time_embed = SinusoidEmbedding(config)
        self.label_embed = nn.Embedding(num_labels, config.dim) if num_labels else None

    def forward(
        self, x: Tensor, sinusoid: Tensor, condition: Tensor | None, rotary: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Apply the block.

        Args:
            x: tokens [B, T, D].
            sinusoid: of the timestep, float32 [B, 256].
            condition: classes [B], or None.
            rotary: as of `Block`.

        Returns:
            tokens [B, T, D], and the block's conditioning vector [B, D].
        """
        c = self.time_embed(sinusoid)
        if self.label_embed is not None:
            c = c + self.label_embed(condition)
        c = F.silu(c)
        return self._apply_layers(x, c, rotary), c


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
            shift, scale = self.modulation(c)[:, None].chunk(2, dim=-1)  # two of [B, 1, D]
            x = modulate(x, shift, scale)
        return self.linear(x)  # [B, T, C_out p p]


class Attention(nn.Module):
    """Multi-head self-attention over all tokens."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv = nn.Linear(config.dim, 3 * config.dim, bias=config.attention_bias)
        self.out = nn.Linear(config.dim, config.dim, bias=config.attention_bias)
        head_dim = config.dim // config.num_heads
        self.q_norm = RMSNorm(head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(head_dim, config.norm_eps) if config.qk_norm else None
        self.exchange: TokenExchange | None = None

    def forward(self, x: Tensor, rotary: Tensor | None) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, -1))  # [B, T, 3, N, D / N]
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each [B, N, T, D / N]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return self.out(attend(q, k, v, rotary, self.exchange if self.training else None))  # [B, T, D]


class GeluMLP(nn.Module):
    """Linear, GELU in its tanh form, linear."""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(dim, hidden_dim)
        self.out = nn.Linear(hidden_dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.gelu(self.hidden(x), approximate="tanh"))


class SwiGLU(nn.Module):
    """Feed-forward out(silu(gate x) * (up x)) without biases; gate and up are packed in one linear.

    Source: Shazeer, "GLU variants improve transformer", arXiv 2002.05202, equation 6.
    """

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(dim, 2 * hidden_dim, bias=False)
        self.out = nn.Linear(hidden_dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)  # each [B, T, hidden_dim]
        return self.out(F.silu(gate) * up)


MLPS = {"gelu": GeluMLP, "swiglu": SwiGLU}


class SinusoidEmbedding(nn.Module):
    """Linear, SiLU, linear of the timestep's sinusoid [B, 256]."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.hidden = nn.Linear(SINUSOID_CHANNELS, config.dim)
        self.out = nn.Linear(config.dim, config.dim)

    def forward(self, sinusoid: Tensor) -> Tensor:
        return self.out(F.silu(self.hidden(sinusoid.to(self.hidden.weight.dtype))))  # [B, D]


class TimestepEmbedding(SinusoidEmbedding):
    """Sinusoid of the timestep, linear, SiLU, linear."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__(config)
        self.reach_lowest = config.timestep_frequencies == "diffusers"

    def forward(self, t: Tensor) -> Tensor:
        return super().forward(timestep_sinusoid(t, SINUSOID_CHANNELS, reach_lowest=self.reach_lowest))





def sincos_table(dim: int, grid: tuple[int, int]) -> Tensor:
    """Fixed 2-D position table [T, dim], float64: a quarter each of sin and cos of the column, sin and cos of the row.

    Source: the paper's public weights, whose first half belongs to the column.
    """
    columns, rows = _grid_angles(dim // 4, grid)  # each [T, dim / 4]
    return torch.cat((columns.sin(), columns.cos(), rows.sin(), rows.cos()), dim=-1)


def rotary_table(head_dim: int, grid: tuple[int, int]) -> Tensor:
    """Cosines and sines [2, T, head_dim / 2], float64: half of the angles go with the column, half with the row.

    Source: Su et al., "RoFormer", arXiv 2104.09864, equation 34, applied to each axis.
    """
    angles = torch.cat(_grid_angles(head_dim // 4, grid), dim=-1)  # [T, head_dim / 2]
    return torch.stack((angles.cos(), angles.sin()))


def attend(q: Tensor, k: Tensor, v: Tensor, rotary: Tensor | None, exchange: TokenExchange | None = None) -> Tensor:
    """Attend to all tokens: queries and keys [B, N, T, D / N], rotated by the table if there is one, to values; [B, T, D].

    Where processes have some of the tokens each, they exchange them for all tokens of some heads.
    """
    if exchange is not None:
        q, k, v = exchange.all_tokens_of_own_heads(torch.stack((q, k, v))).unbind(0)
    if rotary is not None:
        q, k = rotate(q, rotary).to(v.dtype), rotate(k, rotary).to(v.dtype)
    x = F.scaled_dot_product_attention(q, k, v)  # [B, N, T, D / N]
    if exchange is not None:
        x = exchange.own_tokens_of_all_heads(x)
    return x.transpose(1, 2).flatten(2)


def rotate(x: Tensor, rotary: Tensor) -> Tensor:
    """Rotate channel i against channel i + D / N / 2 of queries or keys [B, N, T, D / N] by the table's angles.

    The table is float32, which makes the arithmetic and the result float32 when x is bfloat16.
    """
    cos, sin = rotary.unbind(0)  # each [T, D / N / 2]
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


def _grid_angles(count: int, grid: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Column and row number of each token times `count` frequencies 10000^(-i / count), each [T, count]."""
    frequencies = 10000.0 ** (-torch.arange(count, dtype=torch.float64) / count)
    rows, columns = torch.meshgrid(*(torch.arange(n, dtype=torch.float64) for n in grid), indexing="ij")
    return columns.reshape(-1, 1) * frequencies, rows.reshape(-1, 1) * frequencies


def _norm(config: DiTConfig, eps: float) -> nn.Module:
    if config.norm == "rmsnorm":
        return RMSNorm(config.dim, eps, config.norm_affine)
    return LayerNorm(config.dim, eps, config.norm_affine)
