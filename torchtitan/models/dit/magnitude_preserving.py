"""Magnitude-preserving diffusion transformer: EDM2's layers instead of DiT's.

Every weight counts by the direction of its rows alone, residual sums and the activation keep the mean square, queries,
keys and values are normalised, so that their products are cosines, and a block's input is normalised per token. There
are no biases and no norms with learned gains; the gains on conditions and output start at 0.

Source: Karras et al., "Analyzing and improving the training dynamics of diffusion models", arXiv 2312.02696, section 2
(there a U-Net, configuration G); as a transformer also Bill et al., "Exploring magnitude preservation and rotation
modulation in diffusion transformers", arXiv 2505.19122.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan.conditions import Classes, Condition, ConditionKind
from torchtitan.models.base import TokenExchange
from torchtitan.models.dit.config import DiTConfig
from torchtitan.models.dit.model import PatchTransformer, attend
from torchtitan.models.layers import SINUSOID_CHANNELS, timestep_sinusoid
from torchtitan.models.magnitude import MPLinear, init_magnitude_preserving, mp_gelu, mp_silu, mp_sum, pixel_norm

# Share of a branch in the residual sum, and of either condition in theirs. Source: the paper's table of hyperparameters.
_BRANCH, _LABEL, _POSITION = 0.3, 0.5, 0.5


class MagnitudePreservingDiT(PatchTransformer):
    """Diffusion transformer of unit mean squares; the null class is a vector of zeros."""

    def __init__(self, config: DiTConfig, image_shape: tuple[int, int, int], condition_kind: ConditionKind) -> None:
        super().__init__(config, image_shape, condition_kind)
        # The constant channel stands in for a bias.
        self.patch_embed = MPLinear(image_shape[0] * config.patch_size**2 + 1, config.dim)
        self.time_embed = MPLinear(SINUSOID_CHANNELS, config.dim)
        self.label_embed = MPLinear(condition_kind.count, config.dim) if isinstance(condition_kind, Classes) else None
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.output = OutputLayer(config.dim, self.out_channels * config.patch_size**2)

    def transform(
        self, patches: Tensor, position: Tensor | None, t: Tensor, condition: Condition, duration: Tensor | None,
        guidance: Tensor | None,
    ) -> Tensor:  # fmt: skip
        patches = patches.to(self.patch_embed.weight.dtype)
        x = self.patch_embed(torch.cat((patches, torch.ones_like(patches[..., :1])), dim=-1))  # [B, T, D]
        if position is not None:
            # Sines and cosines have a mean square of 1/2.
            x = mp_sum(x, (math.sqrt(2.0) * position).to(x.dtype), _POSITION)
        c = self._embed_conditions(t, condition)  # [B, D]
        for block in self.layers:
            x = block(x, c, self.rotary)  # [B, T, D]
        return self.output(x)

    def _embed_conditions(self, t: Tensor, condition: Condition) -> Tensor:
        dtype = self.time_embed.weight.dtype
        sinusoid = timestep_sinusoid(t, SINUSOID_CHANNELS, reach_lowest=self.config.timestep_frequencies == "diffusers")
        c = self.time_embed((math.sqrt(2.0) * sinusoid).to(dtype))
        if self.label_embed is not None and isinstance(condition, Tensor):
            count = self.label_embed.in_features
            # Of unit mean square for a class, zeros for the null class.
            one_hot = F.one_hot(condition, count + 1)[:, :count].to(dtype)
            c = mp_sum(c, self.label_embed(math.sqrt(count) * one_hot), _LABEL)
        return mp_silu(c)

    def init_weights(self) -> None:
        """Draw raw weights from N(0, 1); gains are 0, and so is the first prediction."""
        self.init_buffers()
        init_magnitude_preserving(self)
        for name, parameter in self.named_parameters():
            if name.endswith("gain"):
                nn.init.zeros_(parameter)


class Block(nn.Module):
    """Attention and feed-forward in magnitude-preserving sums; gain: of the conditions' scales on their inputs [2]."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.attention = Attention(config.dim, config.num_heads)
        self.mlp = MLPS[config.mlp](config.dim, config.mlp_hidden_dim)
        self.modulation = MPLinear(config.dim, 2 * config.dim)
        self.gain = nn.Parameter(torch.empty(2))

    def forward(self, x: Tensor, c: Tensor, rotary: Tensor | None) -> Tensor:
        """Apply the block. x: tokens [B, T, D]; c: conditioning vector [B, D]; rotary: table [2, T, D / N / 2] or None.
        """
        scales = 1.0 + self.gain[:, None] * self.modulation(c).unflatten(-1, (2, -1))  # [B, 2, D]
        of_attention, of_mlp = scales.to(x.dtype)[:, :, None].unbind(1)  # two of [B, 1, D]
        x = pixel_norm(x, dim=-1)
        x = mp_sum(x, self.attention(x * of_attention, rotary), _BRANCH)
        return mp_sum(x, self.mlp(x * of_mlp), _BRANCH)


class Attention(nn.Module):
    """Multi-head self-attention by cosines: queries, keys and values are normalised per head."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = MPLinear(dim, 3 * dim)
        self.out = MPLinear(dim, dim)
        self.exchange: TokenExchange | None = None

    def forward(self, x: Tensor, rotary: Tensor | None) -> Tensor:
        qkv = pixel_norm(self.qkv(x).unflatten(-1, (3, self.num_heads, -1)), dim=-1)  # [B, T, 3, N, D / N]
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each [B, N, T, D / N]
        return self.out(attend(q, k, v, rotary, self.exchange if self.training else None))  # [B, T, D]


class GeluMLP(nn.Module):
    """Linear, GELU in its tanh form over its magnitude, linear."""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.hidden = MPLinear(dim, hidden_dim)
        self.out = MPLinear(hidden_dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(mp_gelu(self.hidden(x)))


class SwiGLU(nn.Module):
    """Feed-forward out(mp_silu(gate x) * (up x)); gate and up are packed in one linear."""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.gate_up = MPLinear(dim, 2 * hidden_dim)
        self.out = MPLinear(hidden_dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)  # each [B, T, hidden_dim]
        return self.out(mp_silu(gate) * up)


MLPS = {"gelu": GeluMLP, "swiglu": SwiGLU}


class OutputLayer(nn.Module):
    """Projection of tokens to patches, times a learned gain [1]."""

    def __init__(self, dim: int, patch_channels: int) -> None:
        super().__init__()
        self.linear = MPLinear(dim, patch_channels)
        self.gain = nn.Parameter(torch.empty(1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return y * self.gain.to(y.dtype)  # [B, T, C_out p p]
