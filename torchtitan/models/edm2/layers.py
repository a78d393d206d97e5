"""Layers of EDM2's U-Nets: embedding, blocks and attention.

Configurations C and E share their blocks (`GroupNormBlock`), E with weights that count by their direction; G has its own
(`MagnitudePreservingBlock`). No layer has a bias.

Source: Karras et al., "Analyzing and improving the training dynamics of diffusion models", arXiv 2312.02696, section 2,
appendix B and figures 17, 19 and 21.
"""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan.conditions import Condition
from torchtitan.models.dropout import dropout
from torchtitan.models.edm2.config import EDM2Config
from torchtitan.models.layers import group_norm, own_dtype
from torchtitan.models.magnitude import MPConv2d, MPFourier, MPLinear, mp_cat, mp_silu, mp_sum, pixel_norm

Resample = Literal["keep", "down", "up"]
BlockKind = Literal["encoder", "decoder"]

GROUPS = 32
OUTPUT_GROUPS = 8
# Share of the residual branch and of attention in their sums.
_BRANCH_SHARE = 0.3
_CLIP = 256.0


def conv2d(config: EDM2Config, in_channels: int, out_channels: int, kernel_size: int) -> nn.Module:
    """Convolution of a configuration, which keeps the size of its input."""
    if config.config == "C":
        return nn.Conv2d(in_channels, out_channels, kernel_size, padding=kernel_size // 2, bias=False)
    return MPConv2d(in_channels, out_channels, kernel_size)


def linear(config: EDM2Config, in_features: int, out_features: int) -> nn.Module:
    """Linear of a configuration."""
    if config.config == "C":
        return nn.Linear(in_features, out_features, bias=False)
    return MPLinear(in_features, out_features)


class Embedding(nn.Module):
    """Embedding of the noise level and, if there are any, of classes.

    C, E:  SiLU(W2 SiLU(W1 cos) + Wc c)       cos: waves cos(2 pi (f t + phase))
    G:     MP-SiLU(MP-sum(W1 waves, Wc c, 0.5))

    c is the one-hot class times sqrt(K), zero for the null class. The paper gives G's; the place of the class in C and E is
    that of ADM, the network from which the paper starts: before the last SiLU.
    """

    def __init__(self, config: EDM2Config, num_classes: int) -> None:
        super().__init__()
        self.preserves, self.num_classes = config.config == "G", num_classes
        width = embedding_channels(config)
        self.waves = MPFourier(config.channels)
        self.noise = linear(config, config.channels, width)
        self.hidden = None if self.preserves else linear(config, width, width)
        self.label = linear(config, num_classes, width) if num_classes else None

    def forward(self, t: Tensor, condition: Condition) -> Tensor:
        """Embedding [B, 4 channels] of c_noise t [B] and classes [B]."""
        waves = self.waves(t)  # [B, channels]
        if self.hidden is None:
            embedded = _apply(self.noise, waves)  # [B, E]
            if self.label is not None:
                embedded = mp_sum(embedded, _apply(self.label, self._one_hot(condition, waves)), 0.5)
            return mp_silu(embedded)
        embedded = _apply(self.hidden, F.silu(_apply(self.noise, waves * math.sqrt(0.5))))
        if self.label is not None:
            embedded = embedded + _apply(self.label, self._one_hot(condition, waves))
        return F.silu(embedded)

    def _one_hot(self, condition: Condition, like: Tensor) -> Tensor:
        assert isinstance(condition, Tensor)
        classes = torch.arange(self.num_classes, device=condition.device)
        return (condition[:, None] == classes).to(like.dtype) * math.sqrt(self.num_classes)  # [B, K]


class GroupNormBlock(nn.Module):
    """Residual block of configurations C and E, with attention or without.

    Encoder and decoder have the same one; the decoder's takes a skip connection, concatenated to its input.
    """

    def __init__(
        self, config: EDM2Config, in_channels: int, out_channels: int, *, resample: Resample = "keep",
        attention: bool = False,
    ) -> None:
        super().__init__()
        self.resample, self.dropout, self.clips = resample, config.dropout, config.config == "E"
        self.conv0 = conv2d(config, in_channels, out_channels, 3)
        self.embedding = linear(config, embedding_channels(config), out_channels)
        self.conv1 = conv2d(config, out_channels, out_channels, 3)
        self.skip = conv2d(config, in_channels, out_channels, 1) if in_channels != out_channels else None
        self.attention = Attention(config, out_channels) if attention else None

    def forward(self, x: Tensor, embedded: Tensor, keys: Tensor | None, skip: Tensor | None = None) -> Tensor:
        """Apply the block: x [B, C, H, W] -> [B, C_out, H', W']; keys [B, 2] of dropout, None where none is dropped."""
        if skip is not None:
            x = torch.cat((x, skip), dim=1)
        y = self.conv0(resampled(F.silu(group_norm(x, GROUPS)), self.resample))
        y = group_norm(y, GROUPS)
        y = F.silu(y * (1.0 + _per_pixel(_apply(self.embedding, embedded), y)))
        y = self.conv1(y if keys is None else dropout(y, keys, self.dropout))
        x = resampled(x, self.resample)
        x = (x if self.skip is None else self.skip(x)) + y
        if self.attention is not None:
            x = x + self.attention(x)
        return x.clamp(-_CLIP, _CLIP) if self.clips else x


class MagnitudePreservingBlock(nn.Module):
    """Residual block of configuration G, with attention or without."""

    def __init__(
        self, config: EDM2Config, in_channels: int, out_channels: int, *, kind: BlockKind,
        resample: Resample = "keep", attention: bool = False,
    ) -> None:
        """kind: encoder blocks change the width first and normalise pixels; decoder blocks change it in the sum."""
        super().__init__()
        self.kind, self.resample, self.dropout = kind, resample, config.dropout
        self.epsilon = config.pixel_norm_epsilon
        self.gain_init = config.embedding_gain_init
        self.conv0 = MPConv2d(out_channels if kind == "encoder" else in_channels, out_channels, 3)
        self.embedding = MPLinear(embedding_channels(config), out_channels)
        self.embedding_gain = nn.Parameter(torch.empty(1))
        self.conv1 = MPConv2d(out_channels, out_channels, 3)
        self.skip = MPConv2d(in_channels, out_channels, 1) if in_channels != out_channels else None
        self.attention = Attention(config, out_channels) if attention else None

    def init_gain(self) -> None:
        """Initialise the gain; weights are drawn by `init_magnitude_preserving`."""
        nn.init.constant_(self.embedding_gain, self.gain_init)

    def forward(self, x: Tensor, embedded: Tensor, keys: Tensor | None, skip: Tensor | None = None) -> Tensor:
        """Apply the block, as that of `GroupNormBlock`."""
        if skip is not None:
            x = mp_cat(x, skip, 0.5, dim=1)
        x = resampled(x, self.resample)
        if self.kind == "encoder":
            x = x if self.skip is None else self.skip(x)
            x = unit_norm(x, 1, self.epsilon)
        y = self.conv0(mp_silu(x))
        scale = 1.0 + self.embedding(embedded) * self.embedding_gain.to(embedded.dtype)
        y = mp_silu(y * _per_pixel(scale, y))
        y = self.conv1(y if keys is None else dropout(y, keys, self.dropout))
        if self.kind == "decoder" and self.skip is not None:
            x = self.skip(x)
        x = mp_sum(x, y, _BRANCH_SHARE)
        if self.attention is not None:
            x = mp_sum(x, self.attention(x), _BRANCH_SHARE)
        return x.clamp(-_CLIP, _CLIP)


class Attention(nn.Module):
    """Self-attention over pixels with queries, keys and values of unit norm per head.

    The channels of `qkv` are ordered (head, channel of the head, query | key | value), as in the published weights.
    """

    def __init__(self, config: EDM2Config, channels: int) -> None:
        super().__init__()
        self.channels = channels
        self.num_heads = channels // config.channels_per_head if config.channels_per_head else 1
        self.epsilon = config.pixel_norm_epsilon
        self.qkv = conv2d(config, channels, 3 * channels, 1)
        self.out = conv2d(config, channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Attend: [B, C, H, W] -> the same shape."""
        qkv = self.qkv(x).flatten(2).unflatten(1, (self.num_heads, -1, 3))  # [B, N, C / N, 3, T]
        qkv = unit_norm(qkv, 2, self.epsilon)
        queries, keys, values = qkv.transpose(2, 4).unbind(3)  # each [B, N, T, C / N]
        y = F.scaled_dot_product_attention(queries, keys, values)  # [B, N, T, C / N]
        # In memory as x: the gradient of a 1 x 1 convolution follows its input, and DDP wants the weight's order.
        return self.out(y.transpose(2, 3).reshape(x.shape).contiguous())


def embedding_channels(config: EDM2Config) -> int:
    """Width of the embedding."""
    return 4 * config.channels


def unit_norm(x: Tensor, dim: int, epsilon: str) -> Tensor:
    """Normalise over `dim` to unit root mean square; `epsilon` is a value of model.pixel_norm_epsilon."""
    if epsilon == "added_to_norm":
        return pixel_norm(x, dim)
    square = x.to(torch.promote_types(x.dtype, torch.float32)).square().mean(dim, keepdim=True)
    return (x * torch.rsqrt(square + 1e-8)).to(x.dtype)


def resampled(x: Tensor, resample: Resample) -> Tensor:
    """Average 2 x 2 pixels, or repeat each pixel 2 x 2 times."""
    if resample == "down":
        return F.avg_pool2d(x, 2)
    if resample == "up":
        with own_dtype(x):
            return F.interpolate(x, scale_factor=2, mode="nearest")
    return x


def _apply(layer: nn.Module, x: Tensor) -> Tensor:
    """Apply a linear to float32 vectors: MPLinear computes in their dtype, nn.Linear in its weight's."""
    return layer(x.to(layer.weight.dtype) if isinstance(layer, nn.Linear) else x)


def _per_pixel(vector: Tensor, like: Tensor) -> Tensor:
    return vector.to(like.dtype)[:, :, None, None]
