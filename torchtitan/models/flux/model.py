"""Flux: a transformer in which the tokens of an image and of its text attend to each other.

Source: the sizes and formulas of FLUX.1 as published by black-forest-labs; the two-stream block is of Esser et al.,
"Scaling rectified flow transformers for high-resolution image synthesis", arXiv 2403.03206.
"""

from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan.conditions import POOLED, TEXT, Condition, ConditionKind
from torchtitan.models.base import DiffusionModel, LinearRole, ProbePoint
from torchtitan.models.flux.config import FluxConfig
from torchtitan.models.flux.layers import DoubleBlock, OutputLayer, SingleBlock, rotary_table
from torchtitan.models.layers import (
    SINUSOID_CHANNELS,
    RMSNorm,
    VectorEmbedding,
    patchify,
    timestep_sinusoid,
    unpatchify,
)

_VECTOR = ("time_embed", "pooled_embed", "guidance_embed")


class Flux(DiffusionModel):
    """Flux, for images of any size that the patches divide.

    The time is c_noise of a flow, 1000 t. With a guidance embedding the scale is `guidance`, the same for all images.

    Args:
        config: a row of FLAVORS, or any other choice of its fields.
        image_shape: (C, H, W) of the images that it is mostly used for.
        condition_kind: embeddings TEXT [L, text_dim] and POOLED [pooled_dim].

    Raises:
        ValueError: the config's fields do not fit together, or do not fit the image or the text.
    """

    rotary: Tensor
    guidance: Tensor

    def __init__(self, config: FluxConfig, image_shape: tuple[int, int, int], condition_kind: ConditionKind) -> None:
        super().__init__()
        if found := problems(config, image_shape) + condition_problems(config, condition_kind):
            raise ValueError("; ".join(found))
        self.config = config
        self.condition_kind = condition_kind
        self.image_shape = (image_shape[0], image_shape[1], image_shape[2])
        self.out_channels = image_shape[0]
        self.num_text_tokens = condition_kind.entries[TEXT][0][0]
        patch_channels = image_shape[0] * config.patch_size**2
        self.patch_embed = nn.Linear(patch_channels, config.dim)
        self.text_embed = nn.Linear(config.text_dim, config.dim)
        self.time_embed = VectorEmbedding(SINUSOID_CHANNELS, config.dim)
        self.pooled_embed = VectorEmbedding(config.pooled_dim, config.dim)
        self.guidance_embed = VectorEmbedding(SINUSOID_CHANNELS, config.dim) if config.guidance_embedding else None
        self.double_layers = nn.ModuleList(DoubleBlock(config) for _ in range(config.num_double_layers))
        self.single_layers = nn.ModuleList(SingleBlock(config) for _ in range(config.num_single_layers))
        self.output = OutputLayer(config, patch_channels)
        # Filled by init_buffers, in no checkpoint, float32 whatever the weights are.
        table = torch.empty(2, self.num_text_tokens + self._num_tokens(), sum(config.axes_dim) // 2, dtype=torch.float32)
        self.register_buffer("rotary", table, persistent=False)
        self.register_buffer("guidance", torch.empty((), dtype=torch.float32), persistent=False)

    def forward(self, x: Tensor, t: Tensor, condition: Condition = None) -> Tensor:
        text, pooled = self._checked(x, condition)
        grid = self._grid(x.shape[2], x.shape[3])
        dtype = self.patch_embed.weight.dtype
        image = self.patch_embed(patchify(x, self.config.patch_size).to(dtype))  # [B, T, D]
        text = self.text_embed(text.to(dtype))  # [B, L, D]
        c = self.time_embed(timestep_sinusoid(t, SINUSOID_CHANNELS)) + self.pooled_embed(pooled)  # [B, D]
        if self.guidance_embed is not None:
            # Scaled as the time is, by 1000.
            c = c + self.guidance_embed(timestep_sinusoid(1000 * self.guidance.expand(len(x)), SINUSOID_CHANNELS))
        c = F.silu(c)
        rotary = self.rotary if tuple(x.shape[2:]) == self.image_shape[1:] else self._table(grid, x.device)
        for double in self.double_layers:
            image, text = double(image, text, c, rotary)  # [B, T, D], [B, L, D]
        tokens = torch.cat((text, image), dim=1)  # [B, L + T, D]
        for single in self.single_layers:
            tokens = single(tokens, c, rotary)
        patches = self.output(tokens[:, self.num_text_tokens :], c)  # [B, T, C p p]
        x = unpatchify(patches, grid, self.config.patch_size)  # [B, C, H, W]
        return x.to(torch.promote_types(x.dtype, torch.float32))

    def set_guidance(self, scale: float | None, interval: tuple[float, float] = (0.0, 1.0)) -> None:
        self.guidance.fill_(self.config.guidance if scale is None else scale)

    def init_weights(self) -> None:
        """Initialise as a DiT: identity blocks, zero prediction; FLUX.1's own initialisation is not published."""
        self.init_buffers()
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
            elif isinstance(module, RMSNorm) and module.weight is not None:
                nn.init.ones_(module.weight)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear) and name.startswith(_VECTOR):
                nn.init.normal_(module.weight, std=0.02)
            elif name.endswith("modulation"):
                nn.init.zeros_(module.weight)
        nn.init.zeros_(self.output.linear.weight)

    def init_buffers(self) -> None:
        self.rotary.copy_(self._table(self._grid(*self.image_shape[1:]), None))
        self.set_guidance(None)

    def blocks(self) -> list[nn.Module]:
        return list(chain(self.double_layers, self.single_layers))

    def probe_points(self) -> dict[str, ProbePoint]:
        doubles = [f"double_layers.{number}" for number in range(len(self.double_layers))]
        singles = [f"single_layers.{number}" for number in range(len(self.single_layers))]
        return {
            f"block_{place + 1}": ProbePoint(name, 2, 0 if name in doubles else self.num_text_tokens)
            for place, name in enumerate(doubles + singles)
        }

    def linear_roles(self) -> dict[str, LinearRole]:
        def role(name: str) -> LinearRole:
            if name.startswith(_VECTOR) or name.endswith("modulation"):
                return "vector"
            return "small" if name in ("patch_embed", "text_embed", "output.linear") else "token"

        return {name: role(name) for name, module in self.named_modules() if isinstance(module, nn.Linear)}

    def tokens_per_image(self, image_shape: tuple[int, int, int]) -> int:
        rows, columns = self._grid(*image_shape[1:])
        return rows * columns

    def attention_macs(self, num_tokens: int) -> int:
        return self.config.depth * 2 * (self.num_text_tokens + num_tokens) ** 2 * self.config.dim

    def applications(self, image_shape: tuple[int, int, int]) -> dict[str, int]:
        image, text = self.tokens_per_image(image_shape), self.num_text_tokens

        def times(name: str, role: LinearRole) -> int:
            if role == "vector":
                return 1
            if name == "text_embed" or (name.startswith("double_layers") and ".text." in name):
                return text
            return image + text if name.startswith("single_layers") else image

        return {name: times(name, role) for name, role in self.linear_roles().items()}

    def _num_tokens(self) -> int:
        return self.tokens_per_image(self.image_shape)

    def _grid(self, height: int, width: int) -> tuple[int, int]:
        return height // self.config.patch_size, width // self.config.patch_size

    def _table(self, grid: tuple[int, int], device: torch.device | None) -> Tensor:
        table = rotary_table(self.config.axes_dim, self.num_text_tokens, grid, device)
        return table.to(self.rotary.dtype)

    def _checked(self, x: Tensor, condition: Condition) -> tuple[Tensor, Tensor]:
        """Text and pooled embedding. Raises ValueError."""
        patch = self.config.patch_size
        if x.ndim != 4 or x.shape[1] != self.image_shape[0] or x.shape[2] % patch or x.shape[3] % patch:
            wanted = f"B images of {self.image_shape[0]} channels, sides multiples of {patch}"
            raise ValueError(f"x is {tuple(x.shape)}; this model takes {wanted}")
        if not isinstance(condition, dict) or not condition.keys() >= {TEXT, POOLED}:
            given = "missing" if condition is None else "of another kind"
            raise ValueError(f"condition is {given}: this model takes {TEXT} and {POOLED}")
        if condition[TEXT].shape[1] != self.num_text_tokens:
            raise ValueError(f"{TEXT} has {condition[TEXT].shape[1]} tokens; this model takes {self.num_text_tokens}")
        return condition[TEXT], condition[POOLED]


def problems(config: FluxConfig, image_shape: tuple[int, int, int]) -> list[str]:
    """Problems of this model with images (C, H, W): one line each, empty if it can be built."""
    found = []
    _, height, width = image_shape
    if height % config.patch_size or width % config.patch_size:
        found.append(f"model.patch_size: {config.patch_size} does not divide the image of {height} x {width}")
    if config.dim % config.num_heads:
        found.append(f"model.num_heads: {config.num_heads} does not divide model.dim = {config.dim}")
    elif len(config.axes_dim) != 3 or any(channels < 2 or channels % 2 for channels in config.axes_dim):
        found.append(f"model.axes_dim: {config.axes_dim} are not three even numbers of channels")
    elif sum(config.axes_dim) != config.dim // config.num_heads:
        head = f"model.dim / model.num_heads = {config.dim // config.num_heads}"
        found.append(f"model.axes_dim: {config.axes_dim} add up to {sum(config.axes_dim)} channels, a head has {head}")
    return found


def condition_problems(config: FluxConfig, kind: ConditionKind) -> list[str]:
    """Reasons why the network cannot take conditions of a kind: one line each."""
    entries = kind.entries
    if not entries.keys() >= {TEXT, POOLED}:
        given = ", ".join(entries) or "nothing"
        return [f"model.name: flux takes the embeddings {TEXT} and {POOLED}, the data give {given} (encode captions with both)"]
    (shape, _), (pooled_shape, _) = entries[TEXT], entries[POOLED]
    if len(shape) != 2 or len(pooled_shape) != 1:
        return [f"model.name: flux takes {TEXT} [tokens, width] and {POOLED} [width], the data give {shape} and {pooled_shape}"]
    widths = (("text_dim", TEXT, shape[1]), ("pooled_dim", POOLED, pooled_shape[0]))
    return [
        f"model.{key}: {getattr(config, key)}, and the data's {entry} has width {width} (set it to {width}, or, as given"
        f" weights need, encode by a data.{key.replace('_dim', '_encoder')} of width {getattr(config, key)})"
        for key, entry, width in widths if getattr(config, key) != width
    ]
