"""Layers of Flux: the two kinds of block, the output layer, and rotary embedding in interleaved pairs.

B images, T image tokens, L text tokens, width D, N heads of width D / N. Text comes before the image wherever both are one row.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan.models.flux.config import FluxConfig
from torchtitan.models.layers import LayerNorm, RMSNorm, modulate

NORM_EPS = 1e-6


class DoubleBlock(nn.Module):
    """Block with separate weights for image and text, which attend to each other."""

    def __init__(self, config: FluxConfig) -> None:
        super().__init__()
        self.image = Stream(config)
        self.text = Stream(config)

    def forward(self, image: Tensor, text: Tensor, c: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
        """Apply the block to image [B, T, D] and text [B, L, D]; c: conditioning vector [B, D]; rotary: [2, L + T, D / N / 2].
        """
        image_gates, *of_image = self.image.queries_keys_values(image, c)
        text_gates, *of_text = self.text.queries_keys_values(text, c)
        q, k, v = (torch.cat(pair, dim=2) for pair in zip(of_text, of_image, strict=True))  # each [B, N, L + T, D / N]
        attended = attend(q, k, v, rotary)  # [B, L + T, D]
        length = text.shape[1]
        text = self.text.residual(text, attended[:, :length], text_gates)
        image = self.image.residual(image, attended[:, length:], image_gates)
        return image, text


class Stream(nn.Module):
    """Weights of one of the two token streams of a double block."""

    def __init__(self, config: FluxConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.modulation = nn.Linear(config.dim, 6 * config.dim)
        self.attention_norm = _plain_norm(config)
        self.qkv = nn.Linear(config.dim, 3 * config.dim)
        self.q_norm = RMSNorm(config.dim // config.num_heads, NORM_EPS)
        self.k_norm = RMSNorm(config.dim // config.num_heads, NORM_EPS)
        self.out = nn.Linear(config.dim, config.dim)
        self.mlp_norm = _plain_norm(config)
        self.hidden = nn.Linear(config.dim, config.mlp_hidden_dim)
        self.mlp_out = nn.Linear(config.mlp_hidden_dim, config.dim)

    def queries_keys_values(self, x: Tensor, c: Tensor) -> tuple[tuple[Tensor, ...], Tensor, Tensor, Tensor]:
        """Modulation for `residual`, and queries, keys and values [B, N, tokens, D / N] of tokens [B, tokens, D]."""
        shift, scale, *rest = self.modulation(c)[:, None].chunk(6, dim=-1)  # six of [B, 1, D]
        h = modulate(self.attention_norm(x), shift, scale)
        q, k, v = _heads(self.qkv(h), self.num_heads)
        return tuple(rest), self.q_norm(q), self.k_norm(k), v

    def residual(self, x: Tensor, attended: Tensor, rest: tuple[Tensor, ...]) -> Tensor:
        """Add what the attention found, then the feed-forward layer."""
        attention_gate, shift, scale, mlp_gate = rest
        x = torch.addcmul(x, attention_gate, self.out(attended))
        h = self.hidden(modulate(self.mlp_norm(x), shift, scale))
        return torch.addcmul(x, mlp_gate, self.mlp_out(F.gelu(h, approximate="tanh")))


class SingleBlock(nn.Module):
    """Block with one set of weights for all tokens, attention and feed-forward layer side by side."""

    def __init__(self, config: FluxConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.widths = (3 * config.dim, config.mlp_hidden_dim)
        self.modulation = nn.Linear(config.dim, 3 * config.dim)
        self.norm = _plain_norm(config)
        self.qkv_hidden = nn.Linear(config.dim, sum(self.widths))
        self.q_norm = RMSNorm(config.dim // config.num_heads, NORM_EPS)
        self.k_norm = RMSNorm(config.dim // config.num_heads, NORM_EPS)
        self.out = nn.Linear(config.dim + config.mlp_hidden_dim, config.dim)

    def forward(self, x: Tensor, c: Tensor, rotary: Tensor) -> Tensor:
        """Apply the block to tokens [B, L + T, D]; the rest as of DoubleBlock."""
        shift, scale, gate = self.modulation(c)[:, None].chunk(3, dim=-1)  # three of [B, 1, D]
        qkv, h = self.qkv_hidden(modulate(self.norm(x), shift, scale)).split(self.widths, dim=-1)
        q, k, v = _heads(qkv, self.num_heads)
        attended = attend(self.q_norm(q), self.k_norm(k), v, rotary)
        return torch.addcmul(x, gate, self.out(torch.cat((attended, F.gelu(h, approximate="tanh")), dim=-1)))


class OutputLayer(nn.Module):
    """Norm, shift and scale, and the projection of image tokens to patches."""

    def __init__(self, config: FluxConfig, patch_channels: int) -> None:
        super().__init__()
        self.norm = _plain_norm(config)
        self.modulation = nn.Linear(config.dim, 2 * config.dim)
        self.linear = nn.Linear(config.dim, patch_channels)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift, scale = self.modulation(c)[:, None].chunk(2, dim=-1)  # two of [B, 1, D]
        return self.linear(modulate(self.norm(x), shift, scale))  # [B, T, C_out p p]



def attend(q: Tensor, k: Tensor, v: Tensor, rotary: Tensor) -> Tensor:
    """Attend to all tokens: queries and keys [B, N, L + T, D / N], rotated, to values; [B, L + T, D]."""
    x = F.scaled_dot_product_attention(rotate_pairs(q, rotary).to(v.dtype), rotate_pairs(k, rotary).to(v.dtype), v)
    return x.transpose(1, 2).flatten(2)


def rotate_pairs(x: Tensor, rotary: Tensor) -> Tensor:
    """Rotate channel 2 i against channel 2 i + 1 of queries or keys [B, N, tokens, D / N] by angle i of the table.

    The table is float32, which makes the arithmetic and the result float32 when x is bfloat16.
    """
    cos, sin = rotary.unbind(0)  # each [tokens, D / N / 2]
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


def rotary_table(
    axes_dim: list[int], num_text_tokens: int, grid: tuple[int, int], device: torch.device | None = None
) -> Tensor:
    """Cosines and sines [2, L + T, sum(axes_dim) / 2], float64, of tokens at (0, row, column); text is at (0, 0, 0).

    Angle i of an axis with d channels is place x 10000^(-2 i / d).

    Source: Su et al., "RoFormer", arXiv 2104.09864, equation 34, on the axes of FLUX.1.
    """
    rows, columns = (torch.arange(count, dtype=torch.float64, device=device) for count in grid)
    places = torch.stack(torch.meshgrid(rows, columns, indexing="ij"), dim=-1).flatten(0, 1)  # [T, 2]
    places = F.pad(places, (1, 0, num_text_tokens, 0))  # [L + T, 3]
    frequencies = [
        10000.0 ** (-torch.arange(0, channels, 2, dtype=torch.float64, device=device) / channels) for channels in axes_dim
    ]
    angles = torch.cat([places[:, axis, None] * of_axis for axis, of_axis in enumerate(frequencies)], dim=-1)
    return torch.stack((angles.cos(), angles.sin()))


def _heads(qkv: Tensor, num_heads: int) -> tuple[Tensor, ...]:
    return qkv.unflatten(-1, (3, num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)  # three of [B, N, tokens, D / N]


def _plain_norm(config: FluxConfig) -> LayerNorm:
    return LayerNorm(config.dim, NORM_EPS, affine=False)
