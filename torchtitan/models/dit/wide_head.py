"""Diffusion transformer with a wide head: a second, wider stream of few blocks that reads the first one token by token.

The first stream s is a DiT without its output layer. The second embeds the same patches, and its blocks and output layer are
modulated for each token by what the first says of that token: SiLU(P SiLU(time + s)), P a linear to the width of the second.
The first stream's conditioning vector passes SiLU twice, as published.

Source: Wang et al., "DDT: decoupled diffusion transformer", arXiv 2504.05741; wide in Zheng et al., "Diffusion transformers with
representation autoencoders", arXiv 2510.11690, section 5.
"""

import logging
from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan.conditions import Condition, ConditionKind
from torchtitan.models.base import LinearRole, ProbePoint
from torchtitan.models.dit.config import DiTConfig
from torchtitan.models.dit.model import Block, DiT, OutputLayer
from torchtitan.models.dit.positions import rotary_table


class WideHeadDiT(DiT):
    """Diffusion transformer of two streams.

    Attributes:
        wide_rotary: table of rotations of the second stream [2, T, D / N / 2], or None; it has no other positions.
    """

    wide_rotary: Tensor | None

    def __init__(self, config: DiTConfig, image_shape: tuple[int, int, int], condition_kind: ConditionKind) -> None:
        super().__init__(config, image_shape, condition_kind)
        wide = wide_config(config)
        self.wide_embed = nn.Linear(image_shape[0] * config.patch_size**2, wide.dim)
        self.wide_condition = nn.Linear(config.dim, wide.dim)
        self.wide_layers = nn.ModuleList(Block(wide) for _ in range(wide.num_layers))
        self.output = OutputLayer(wide, self.patch_channels)
        rotary = None
        if self.rotary is not None:
            rotary = torch.empty(2, self.grid[0] * self.grid[1], wide.dim // wide.num_heads // 2, dtype=torch.float32)
        self.register_buffer("wide_rotary", rotary, persistent=False)

    def embed_conditions(
        self, t: Tensor, condition: Condition, duration: Tensor | None = None, guidance: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        time, label, c = super().embed_conditions(t, condition, duration, guidance)
        return time, label, F.silu(c)

    def read_out(self, patches: Tensor, x: Tensor, time: Tensor, c: Tensor) -> Tensor:
        c = F.silu(self.wide_condition(F.silu(time[:, None] + x)))  # [B, T, D of the second stream]
        x = self.wide_embed(patches.to(self.wide_embed.weight.dtype))
        for block in self.wide_layers:
            x = block(x, c, self.wide_rotary)
        return self.output(x, c)

    def init_buffers(self) -> None:
        super().init_buffers()
        if self.wide_rotary is not None:
            self.wide_rotary.copy_(rotary_table(2 * self.wide_rotary.shape[-1], self.grid))

    def blocks(self) -> list[nn.Module]:
        return [*self.layers, *self.wide_layers]

    def probe_points(self) -> dict[str, ProbePoint]:
        first = len(self.layers) + 1
        wide = {f"block_{first + n}": ProbePoint(f"wide_layers.{n}", 2) for n in range(len(self.wide_layers))}
        return super().probe_points() | wide

    def linear_roles(self) -> dict[str, LinearRole]:
        roles = super().linear_roles()
        for name in roles:
            if name.startswith("wide_layers.") or name == "output.modulation":
                roles[name] = "token"
        return roles | {"wide_embed": "small"}

    def introduction(self, steps: int) -> Iterator[tuple[int, str]]:
        config = self.config
        blocks = f"the last {config.wide_layers} of {config.depth} blocks"
        yield logging.INFO, f"wide head: {blocks}, of width {config.wide_dim} (the others: {config.dim})"

    def attention_macs(self, num_tokens: int) -> int:
        return super().attention_macs(num_tokens) + self.config.wide_layers * 2 * num_tokens**2 * self.config.wide_dim


def wide_config(config: DiTConfig) -> DiTConfig:
    """Sizes of the second stream's blocks; its feed-forward is as many times as wide as its tokens as in the first."""
    return replace(
        config, dim=config.wide_dim, num_layers=config.wide_layers, num_heads=config.wide_heads,
        mlp_hidden_dim=config.mlp_hidden_dim * config.wide_dim // config.dim, class_tokens=0, intermediate_head=None,
        value_residual=False,
    )  # fmt: skip
