"""A network: an MLP that sees each patch by itself, with the patch's place, the time and the class.

    train.py digits --job.name mlp --job.plugins examples/patch_mlp.py --model.name patch_mlp --model.flavor small
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from torchtitan.conditions import Classes, Condition, ConditionKind, Unconditional
from torchtitan.models import MODELS
from torchtitan.models.base import DiffusionModel, LinearRole, ModelConfig, ModelFamily
from torchtitan.models.layers import TokenBias
from torchtitan.settings import setting

PATCH = 2  # pixels of a patch's side


@dataclass(kw_only=True)
class PatchMLPConfig(ModelConfig):
    name: Literal["patch_mlp"] = setting("patch_mlp", "model family")
    flavor: str = setting("small", "row of the family's table of sizes")
    dim: int = setting(128, "width", ge=1)
    num_layers: int = setting(4, "number of hidden layers", ge=1)
    label_dropout: float = setting(0.1, "share of labels dropped for guidance", ge=0, lt=1)


class PatchMLP(DiffusionModel):
    def __init__(self, config: PatchMLPConfig, image_shape: tuple[int, int, int], condition_kind: ConditionKind) -> None:
        super().__init__()
        self.image_shape, self.out_channels, self.condition_kind = image_shape, image_shape[0], condition_kind
        inside = image_shape[0] * PATCH**2
        self.embed = nn.Linear(inside, config.dim)
        self.position = TokenBias(self.tokens_per_image(image_shape), config.dim)
        self.time_embed = nn.Linear(16, config.dim)
        classes = condition_kind.count if isinstance(condition_kind, Classes) else 0
        self.label_embed = nn.Embedding(classes + 1, config.dim)  # the last is the null class
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(config.dim, config.dim), nn.SiLU()) for _ in range(config.num_layers))
        self.output = nn.Linear(config.dim, inside)

    def forward(self, x: Tensor, t: Tensor, condition: Condition = None) -> Tensor:
        _, _, height, width = x.shape
        tokens = nn.functional.unfold(x, PATCH, stride=PATCH).transpose(1, 2)  # [B, T, C P P]
        tokens = self.position(self.embed(tokens.to(self.embed.weight.dtype)))  # [B, T, D]
        waves = torch.cos(t[:, None] / 1000 * torch.arange(16, device=t.device) * torch.pi)  # [B, 16]; t is 1000 t of the path
        label = torch.zeros_like(t, dtype=torch.int64) if condition is None else condition
        beside = self.time_embed(waves.to(tokens.dtype)) + self.label_embed(label)  # [B, D]
        for layer in self.layers:
            tokens = tokens + layer(tokens + beside[:, None])
        patches = self.output(tokens).transpose(1, 2)  # [B, C P P, T]
        x = nn.functional.fold(patches, (height, width), PATCH, stride=PATCH)  # [B, C, H, W]
        return x.to(torch.promote_types(x.dtype, torch.float32))

    def init_weights(self) -> None:
        for name, parameter in self.named_parameters():
            nn.init.zeros_(parameter) if name.endswith("bias") else nn.init.normal_(parameter, std=0.05)

    def init_buffers(self) -> None: ...  # has none

    def blocks(self) -> list[nn.Module]:
        return list(self.layers)

    def linear_roles(self) -> dict[str, LinearRole]:
        roles: dict[str, LinearRole] = {"embed": "small", "output": "small", "time_embed": "vector"}
        return roles | dict.fromkeys((f"layers.{i}.0" for i in range(len(self.layers))), "token")

    def tokens_per_image(self, image_shape: tuple[int, int, int]) -> int:
        return (image_shape[1] // PATCH) * (image_shape[2] // PATCH)

    def attention_macs(self, num_tokens: int) -> int:
        return 0


FLAVORS = {"small": PatchMLPConfig(), "wide": PatchMLPConfig(flavor="wide", dim=512)}
MODELS["patch_mlp"] = ModelFamily(
    PatchMLPConfig, FLAVORS, PatchMLP, problems=lambda config, image_shape: [], conditions=(Unconditional, Classes)
)
