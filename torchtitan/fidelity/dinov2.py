"""DINOv2's ViT-L/14, in whose features FD-DINOv2 is defined, with the two resizings that the field uses.

Sources: Oquab et al. 2023, "DINOv2: Learning Robust Visual Features without Supervision"; Stein et al. 2023, "Exposing
flaws of generative model evaluation metrics and their unfair treatment of diffusion models", for the distance.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, interpolate, scaled_dot_product_attention

from torchtitan.fidelity.feature_extractor import FeatureExtractor, as_rgb, read_published
from torchtitan.fidelity.published import DINOV2
from torchtitan.fidelity.resizing import resize_bicubic_antialias, resize_bicubic_pillow

SIDE = 224
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's pixels in [0, 1]
NORM_EPSILON = 1e-6
GRID_OFFSET = 0.1  # patches that the published code adds to each side before it interpolates positions


@dataclass(frozen=True)
class Resizing:
    """Resizing of uint8 images [B, C, H, W], pixels near [0, 255]; comparable_with: published numbers of it."""

    name: str
    resize: Callable[[Tensor, int], Tensor]
    words: str
    comparable_with: str


EDM2 = Resizing(
    "dinov2", resize_bicubic_antialias, "torch's bicubic to 224 x 224 with antialias, float32, not clamped",
    "FD-DINOv2 of EDM2 and those who follow it",
)  # fmt: skip
DGM_EVAL = Resizing(
    "dinov2-dgm", resize_bicubic_pillow, "Pillow's bicubic to 224 x 224, rounded to whole numbers",
    "FD-DINOv2 and other DINOv2 metrics of dgm-eval",
)  # fmt: skip


class DinoV2(FeatureExtractor):
    """Class token of DINOv2 ViT-L/14 after the last norm."""

    dims = MappingProxyType({"pooled": 1024})

    def __init__(self, resizing: Resizing, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        self.name, self.resize, self.comparable_with = resizing.name, resizing.words, resizing.comparable_with
        self._resize = resizing.resize
        with torch.device("meta"):
            network = VisionTransformer()
        used = {name: tensor.float() for name, tensor in tensors.items() if name != "mask_token"}  # of training alone
        network.load_state_dict(used, assign=True)
        self.network = network.eval().requires_grad_(False).to(device)
        self._mean, self._std = (torch.tensor(each, device=device).reshape(3, 1, 1) for each in (MEAN, STD))
        self.device = device
        self.weights_sha256 = DINOV2.sha256

    @classmethod
    def open(
        cls, resizing: Resizing, weights: Path | None, device: torch.device, option: str = ""
    ) -> "DinoV2":
        """Open the published weights: a file, by that option, or where scripts/download.py puts it. Raises EvaluationError."""
        return cls(resizing, read_published(DINOV2, weights, option), device)

    def _features(self, images: Tensor) -> dict[str, Tensor]:
        x = self._resize(as_rgb(images), SIDE).float().div(255)  # [B, 3, 224, 224]
        return {"pooled": self.network(x.sub_(self._mean).div_(self._std))}


class VisionTransformer(nn.Module):
    """Vision transformer with a class token and LayerScale; parameters have the published names.

    Args:
        patch: pixels of a patch's side.
        grid: patches of a side of the images that the position embedding was trained on.
    """

    def __init__(self, width: int = 1024, depth: int = 24, heads: int = 16, patch: int = 14, grid: int = 37) -> None:
        super().__init__()
        self.grid = grid
        self.cls_token = nn.Parameter(torch.empty(1, 1, width))
        self.pos_embed = nn.Parameter(torch.empty(1, 1 + grid**2, width))
        self.patch_embed = PatchEmbedding(width, patch)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(depth)])
        self.norm = nn.LayerNorm(width, eps=NORM_EPSILON)

    def forward(self, x: Tensor) -> Tensor:
        """Class token [B, width], after the last norm, of normalised images [B, 3, H, W] of whole patches."""
        return self.norm(self._encoded(x)[:, 0])

    def patch_tokens(self, x: Tensor) -> Tensor:
        """Tokens [B, h w, width] of the patches, after the last norm, of images as of `forward`."""
        return self.norm(self._encoded(x)[:, 1:])

    def _encoded(self, x: Tensor) -> Tensor:
        """Tokens [B, 1 + h w, width] before the last norm, the class token first."""
        patches = self.patch_embed.proj(x)  # [B, D, h, w]
        height, width = patches.shape[-2:]
        tokens = patches.flatten(2).transpose(1, 2)  # [B, h w, D]
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), tokens], 1) + self.positions(height, width)
        for block in self.blocks:
            x = block(x)
        return x

    def positions(self, height: int, width: int) -> Tensor:
        """Position embedding of a grid of patches [1, 1 + height * width, D]; interpolated where it is not the own.

        The published code gives the scale of (side + 0.1) / grid, and torch takes places from the scale, not from
        the sides: an interpolation to the sides alone has other values.
        """
        if height == width == self.grid:
            return self.pos_embed
        own = self.pos_embed[:, 1:].unflatten(1, (self.grid, self.grid)).permute(0, 3, 1, 2)  # [1, D, g, g]
        scales = tuple((side + GRID_OFFSET) / self.grid for side in (height, width))
        resized = interpolate(own, scale_factor=scales, mode="bicubic", align_corners=False)  # [1, D, h, w]
        return torch.cat([self.pos_embed[:, :1], resized.flatten(2).transpose(1, 2)], 1)


class PatchEmbedding(nn.Module):
    """Projection of patches to tokens."""

    def __init__(self, width: int, patch: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, width, patch, stride=patch)


class Block(nn.Module):
    """Attention and MLP, each normed before and scaled per channel after."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        norm = partial(nn.LayerNorm, width, eps=NORM_EPSILON)
        self.norm1, self.attn, self.ls1 = norm(), Attention(width, heads), LayerScale(width)
        self.norm2, self.mlp, self.ls2 = norm(), Mlp(width), LayerScale(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.ls1(self.attn(self.norm1(x)))
        return x + self.ls2(self.mlp(self.norm2(x)))


class Attention(nn.Module):
    """Attention of all tokens to all; queries, keys and values by one layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # [3, B, heads, T, D / heads]
        mixed = scaled_dot_product_attention(*parts.unbind(0))
        return self.proj(mixed.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """Two layers with a GELU (exact, not by tanh) between them, four times as wide inside."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, 4 * width)
        self.fc2 = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(gelu(self.fc1(x)))


class LayerScale(nn.Module):
    """Learned gain of each channel."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma
