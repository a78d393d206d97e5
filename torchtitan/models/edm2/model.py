"""U-Nets of EDM2.

Source: Karras et al., "Analyzing and improving the training dynamics of diffusion models", arXiv 2312.02696; the
multi-GPU port FutureXiang/edm2 for configurations C and E.
"""

import math
from collections.abc import Iterator
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan.conditions import Classes, Condition, ConditionKind
from torchtitan.models.base import DiffusionModel, LinearRole, ProbePoint
from torchtitan.models.dropout import dropout_keys
from torchtitan.models.edm2.config import EDM2Config
from torchtitan.models.edm2.layers import (
    GROUPS,
    OUTPUT_GROUPS,
    Attention,
    BlockKind,
    Embedding,
    GroupNormBlock,
    MagnitudePreservingBlock,
    Resample,
    conv2d,
)
from torchtitan.models.layers import check_inputs, group_norm
from torchtitan.models.magnitude import MPConv2d, init_magnitude_preserving

# What no machine holds, and products of which fit in 64 bits.
MOST_LEVELS, MOST_MULTIPLE, MOST_PIXELS, MOST_PARAMETERS = 16, 1024, 2**26, 10**13


class EDM2UNet(DiffusionModel):
    """U-Net of configuration C, E or G, for images of one fixed shape, square or not.

    Level 0 has the image's size, each other half of the one before. The input gets a channel of ones. The decoder's
    blocks, those that double the size excepted, take the outputs of the encoder, the last first.

    Args:
        config: a row of FLAVORS, or any other choice of its fields.
        condition_kind: K classes or nothing; class K is the null class, the zero vector.

    Raises:
        ValueError: the config's fields do not fit together or do not fit the image.
    """

    def __init__(self, config: EDM2Config, image_shape: tuple[int, int, int], condition_kind: ConditionKind) -> None:
        super().__init__()
        if found := problems(config, image_shape):
            raise ValueError("; ".join(found))
        self.config = config
        self.condition_kind = condition_kind
        self.image_shape = (image_shape[0], image_shape[1], image_shape[2])
        self.out_channels = image_shape[0]
        widths = [config.channels * mult for mult in config.channel_mults]

        self.embedding = Embedding(config, condition_kind.count if isinstance(condition_kind, Classes) else 0)
        self.input = conv2d(config, image_shape[0] + 1, widths[0], 3)
        self.levels: dict[str, int] = {}  # of every block, by name
        self.encoder, skips = self._build_encoder(widths)
        self.decoder = self._build_decoder(widths, skips)
        self.output = conv2d(config, widths[0], image_shape[0], 3)
        self.output_gain = nn.Parameter(torch.empty(1)) if config.config == "G" else None
        self._keys: Tensor | None = None

    def forward(self, x: Tensor, t: Tensor, condition: Condition = None) -> Tensor:
        check_inputs(self, x, condition)
        embedded = self.embedding(t, condition)  # [B, E]
        keys = iter(self._dropout_keys(len(x)))
        x = self.input(torch.cat((x, torch.ones_like(x[:, :1])), dim=1).to(self._dtype))  # [B, channels, H, W]
        skips = [x]
        for block in self.encoder.values():
            x = block(x, embedded, next(keys))
            skips.append(x)
        for name, block in self.decoder.items():
            x = block(x, embedded, next(keys), skips.pop() if "block" in name else None)
        if self.output_gain is None:
            x = F.silu(group_norm(x, OUTPUT_GROUPS))
        x = self.output(x)  # [B, C, H, W]
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        return x if self.output_gain is None else x * self.output_gain.to(x.dtype)

    def draw_dropout(self, seed: int, samples: Tensor, attempt: int = 0, steps_left: int | None = None) -> None:
        if self.config.dropout:
            self._keys = dropout_keys(seed, samples, self.config.depth, attempt)

    def init_weights(self) -> None:
        """Initialise: normal raw weights in E and G, torch's default in C, gains as configured, the output's at 0."""
        init_magnitude_preserving(self)
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                module.reset_parameters()
            elif isinstance(module, MagnitudePreservingBlock):
                module.init_gain()
        if self.output_gain is not None:
            nn.init.zeros_(self.output_gain)

    def init_buffers(self) -> None:
        pass  # the waves of the noise level are saved with the weights

    def blocks(self) -> list[nn.Module]:
        return [*self.encoder.values(), *self.decoder.values()]

    def probe_points(self) -> dict[str, ProbePoint]:
        """Outputs of the blocks, numbered from 1 as in the port: `in_k` down, `middle_k`, `out_k` up."""
        middle = [name for name in self.decoder if name.startswith("middle")]
        paths = {
            "in": [f"encoder.{name}" for name in self.encoder],
            "middle": [f"decoder.{name}" for name in middle],
            "out": [f"decoder.{name}" for name in self.decoder if name not in middle],
        }
        return {
            f"{path}_{number}": ProbePoint(module, 1)
            for path, modules in paths.items() for number, module in enumerate(modules, 1)
        }

    def linear_roles(self) -> dict[str, LinearRole]:
        return {name: "vector" for name, module in self.named_modules() if isinstance(module, nn.Linear)}

    def tokens_per_image(self, image_shape: tuple[int, int, int]) -> int:
        """Number of pixels, at level 0."""
        return image_shape[1] * image_shape[2]

    def attention_macs(self, num_tokens: int) -> int:
        return sum(
            2 * (num_tokens >> 2 * self._level(name)) ** 2 * module.channels
            for name, module in self.named_modules() if isinstance(module, Attention)
        )

    def applications(self, image_shape: tuple[int, int, int]) -> dict[str, int]:
        pixels, times = self.tokens_per_image(image_shape), {}
        for name, module in self.named_modules():
            weight = getattr(module, "weight", None)
            if isinstance(weight, Tensor) and weight.ndim == 4:  # a convolution, applied at the size of its block's output
                times[name] = pixels >> 2 * self._level(name)
            elif isinstance(weight, Tensor) and weight.ndim == 2:
                times[name] = 1
        return times

    def _build_encoder(self, widths: list[int]) -> tuple[nn.ModuleDict, list[int]]:
        """Encoder's blocks, and the widths of the skip connections, that of the input convolution included."""
        blocks, skips = nn.ModuleDict(), [widths[0]]
        for level, width in enumerate(widths):
            if level:
                name = f"level{level}_down"
                blocks[name] = self._block(name, level, "encoder", skips[-1], skips[-1], resample="down")
                skips.append(skips[-1])
            for number in range(self.config.num_blocks):
                name = f"level{level}_block{number}"
                blocks[name] = self._block(name, level, "encoder", skips[-1], width, attention=self._attends(level))
                skips.append(width)
        return blocks, skips

    def _build_decoder(self, widths: list[int], skips: list[int]) -> nn.ModuleDict:
        blocks, skips, current, deepest = nn.ModuleDict(), list(skips), widths[-1], len(widths) - 1
        for name in ("middle0", "middle1"):
            blocks[name] = self._block(
                name, deepest, self.config.middle_blocks, current, current, attention=name == "middle0"
            )
        for level in reversed(range(len(widths))):
            if level < deepest:
                name = f"level{level}_up"
                blocks[name] = self._block(name, level, "decoder", current, current, resample="up")
            for number in range(self.config.num_blocks + 1):
                name = f"level{level}_block{number}"
                blocks[name] = self._block(
                    name, level, "decoder", current + skips.pop(), widths[level], attention=self._attends(level)
                )
                current = widths[level]
        return blocks

    def _block(
        self, name: str, level: int, kind: BlockKind, in_channels: int, out_channels: int, *,
        resample: Resample = "keep", attention: bool = False,
    ) -> nn.Module:
        self.levels[name] = level
        if self.config.config == "G":
            return MagnitudePreservingBlock(
                self.config, in_channels, out_channels, kind=kind, resample=resample, attention=attention
            )
        return GroupNormBlock(self.config, in_channels, out_channels, resample=resample, attention=attention)

    @property
    def _dtype(self) -> torch.dtype:
        return cast(nn.Conv2d | MPConv2d, self.input).weight.dtype

    def _attends(self, level: int) -> bool:
        return sides(self.config, self.image_shape)[level] in self.config.attention_resolutions

    def _level(self, name: str) -> int:
        """Level of the module or parameter of a name."""
        return next((self.levels[part] for part in name.split(".") if part in self.levels), 0)

    def _dropout_keys(self, batch: int) -> Tensor | list[None]:
        if not self.training or self._keys is None:
            return [None] * self.config.depth
        if self._keys.shape[1] != batch:
            raise ValueError(f"dropout is drawn for {self._keys.shape[1]} images (draw_dropout), the batch has {batch}")
        return self._keys


def sides(config: EDM2Config, image_shape: tuple[int, int, int]) -> list[int]:
    """Longer side of the feature maps of each level."""
    return [max(image_shape[1:]) >> level for level in range(len(config.channel_mults))]


def problems(config: EDM2Config, image_shape: tuple[int, int, int]) -> list[str]:
    """Problems of this model with images (C, H, W): one line each, empty if it can be built."""
    mults, (_, height, width) = config.channel_mults, image_shape
    if not 1 <= len(mults) <= MOST_LEVELS or min(mults) < 1 or max(mults) > MOST_MULTIPLE:
        return [f"model.channel_mults: {_short(mults)} is not 1 to {MOST_LEVELS} multipliers of 1 to {MOST_MULTIPLE}"]
    found = [*_size_problems(config, height, width), *_attention_problems(config, image_shape)]
    if config.config != "G" and config.channels % GROUPS:
        found.append(
            f"model.channels: {config.channels} is no multiple of {GROUPS}, the groups that configuration {config.config}"
            " normalises (change it, or model.config to G)"
        )
    widest = config.channels * max(mults)
    if config.depth * 27 * widest**2 > MOST_PARAMETERS:
        blocks = f"{config.depth} blocks of up to {27 * widest**2:.1g} parameters"
        found.append(f"model.channels: {blocks} are more than {MOST_PARAMETERS:.0e} (lower it, or model.channel_mults)")
    return found


def _size_problems(config: EDM2Config, height: int, width: int) -> Iterator[str]:
    levels, divisible = len(config.channel_mults), math.gcd(height, width)
    halvings = (divisible & -divisible).bit_length() - 1  # that leave whole numbers of pixels
    if levels - 1 > halvings:
        yield (
            f"model.channel_mults: {levels} levels halve images {levels - 1} times, those of {height} x {width} can be"
            f" halved {halvings} times (give at most {halvings + 1} multipliers, or images of a multiple of"
            f" {2 ** (levels - 1)} pixels)"
        )
    if height * width > MOST_PIXELS:
        yield f"model.channel_mults: images of {height} x {width} have more than {MOST_PIXELS} pixels"


def _attention_problems(config: EDM2Config, image_shape: tuple[int, int, int]) -> Iterator[str]:
    known = sides(config, image_shape)
    if unknown := [side for side in config.attention_resolutions if side not in known]:
        yield (
            f"model.attention_resolutions: {_short(unknown)} is the side of no feature map (they are"
            f" {', '.join(map(str, known))})"
        )
    attending = {level for level, side in enumerate(known) if side in config.attention_resolutions} | {len(known) - 1}
    widths = [config.channels * config.channel_mults[level] for level in sorted(attending)]
    if config.channels_per_head and (odd := [width for width in widths if width % config.channels_per_head]):
        per_head = config.channels_per_head
        yield f"model.channels_per_head: {per_head} does not divide the {odd[0]} channels of a level with attention"


def _short(values: list[int]) -> str:
    if len(values) == 1:
        return str(values[0])
    return str(values) if len(values) <= MOST_LEVELS else f"[{values[0]}, ...], {len(values)} values,"
