"""Diffusion transformer of which some blocks see a random part of the tokens, in training alone.

Each image's kept tokens are drawn anew for every sample, and keep the positions of their places.

    tread     the other tokens skip the blocks, unchanged. Source: Krause et al., "TREAD: token routing for efficient
              architecture-agnostic diffusion training", arXiv 2501.04765, section 3; there with all blocks but the first
              two and the last three
    sprint    the others have a learned mask token behind the blocks, and a linear fuses the tokens [T, 2 D] from before and
              behind these, in sampling too. Source: Park et al., "Sprint: sparse-dense residual fusion for efficient
              diffusion transformers", arXiv 2510.21986, as SR-DiT has it; the authors' code keeps one token of every 2 x 2,
              does not train the mask token, and has it with a probability of 0.1
"""

import logging
import math
from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor, nn

from torchtitan import philox
from torchtitan.conditions import Condition, ConditionKind
from torchtitan.models.dit.config import DiTConfig, SprintConfig, TreadConfig
from torchtitan.models.dit.model import DiT
from torchtitan.models.layers import TokenBias


class TreadDiT(DiT):
    """Diffusion transformer of which the tokens that are not kept skip the routed blocks."""

    _kept: Tensor | None = None  # places of the tokens kept in the next forwards, rising [B, k]; None: all are
    _without_path = False  # whether forwards leave the routed blocks out

    def draw_dropout(self, seed: int, samples: Tensor, attempt: int = 0, steps_left: int | None = None) -> None:
        routing, num_tokens = cast(TreadConfig, self.config.routing), self.grid[0] * self.grid[1]
        count, self._kept = kept_tokens(routing.keep, num_tokens), None
        if count == num_tokens or (steps_left is not None and steps_left <= routing.finish_steps):
            return
        words = philox.random_words(seed, "routing", samples, num_tokens, attempt)  # [B, T]
        self._kept = words.argsort(dim=1, stable=True)[:, :count].sort(dim=1).values

    def apply_blocks(self, x: Tensor, c: Tensor, label: Tensor | None) -> tuple[Tensor, Tensor | None]:
        routed, kept = self.config.routed_blocks, self._kept if self.training else None
        if kept is not None and len(kept) != len(x):
            raise ValueError(f"tokens are drawn for {len(kept)} images (draw_dropout), the batch has {len(x)}")
        before, early, rotary = x, None, self.rotary
        values: tuple[Tensor, ...] = ()
        for number, block in enumerate(self.layers, 1):
            if number == routed[0]:
                before, values_before = x, values
                if kept is not None:
                    x, values = _of_places(x, kept, 1), tuple(_of_places(each, kept, 2) for each in values)
                    rotary = None if rotary is None else rotary[:, kept][:, :, None]  # [2, B, 1, k, D / N / 2]
            if not (self._without_path and number in routed):
                x = block(x, c, rotary, *values)
            if isinstance(x, tuple):
                x, first = x
                values = (first,)
            if number == routed[-1]:
                x, rotary, values = self.join(before, x, kept), self.rotary, values_before
            if self.intermediate is not None and number == self.config.intermediate_head:
                early = self.intermediate(x, c)
        return x, early

    def join(self, before: Tensor, x: Tensor, kept: Tensor | None) -> Tensor:
        """Join tokens from before the routed blocks [B, T, D] with those behind [B, k, D], of places [B, k]; None: all."""
        return x if kept is None else _into_places(before, x, kept)

    def without_path(self, x: Tensor, t: Tensor, condition: Condition = None) -> Tensor:
        """Apply the network, in evaluation, without its routed blocks: no token is kept."""
        self._without_path = True
        try:
            return self(x, t, condition)
        finally:
            self._without_path = False

    def training_macs_per_image(self, image_shape: tuple[int, int, int], steps: int | None = None) -> int:
        routing, blocks = cast(TreadConfig, self.config.routing), self.config.routed_blocks
        num_tokens = self.tokens_per_image(image_shape)
        kept, products = kept_tokens(routing.keep, num_tokens), 0
        inside = tuple(f"layers.{number - 1}." for number in blocks)
        for name, role in self.linear_roles().items():
            if role == "token" and name.startswith(inside):
                products += math.prod(cast(Tensor, self.get_submodule(name).weight).shape)
        saved = (num_tokens - kept) * products + len(blocks) * 2 * (num_tokens**2 - kept**2) * self.config.dim
        share = 1.0 if steps is None else 1.0 - min(routing.finish_steps / steps, 1.0)
        return self.forward_macs_per_image(image_shape) - round(share * saved)

    def introduction(self, steps: int) -> Iterator[tuple[int, str]]:
        yield from super().introduction(steps)
        routing, blocks, shape = cast(TreadConfig, self.config.routing), self.config.routed_blocks, self.image_shape
        if routing.finish_steps >= steps:
            text = f"{routing.finish_steps:,} is no less than training.steps = {steps:,}: no step is routed (lower it)"
            yield logging.WARNING, f"model.routing.finish_steps: {text}"
            return
        if kept_tokens(routing.keep, num_tokens := self.tokens_per_image(shape)) == 1 < num_tokens:
            text = f"{routing.keep:g} keeps 1 of an image's {num_tokens} tokens (raise it, or lower model.patch_size)"
            yield logging.WARNING, f"model.routing.keep: {text}"
        flops = self.training_macs_per_image(shape, steps) / self.forward_macs_per_image(shape)
        seen = f"blocks {blocks[0]} to {blocks[-1]} of {self.config.num_layers} see {100 * routing.keep:.3g} % of the tokens"
        finish = f", in the last {routing.finish_steps:,} steps all" if routing.finish_steps else ""
        yield logging.INFO, f"routing: {seen}{finish}: {flops:.2f} times the FLOPs"


class SprintDiT(TreadDiT):
    """Diffusion transformer that fuses its tokens behind the routed blocks, or mask tokens, with those before.

    A mask token that no image has in a step, as without routing, still has a gradient, of zeros, on which replicas wait.
    """

    _path_dropped: Tensor | None = None  # images of which all tokens have the mask token behind the blocks [B]

    def __init__(self, config: DiTConfig, image_shape: tuple[int, int, int], condition_kind: ConditionKind) -> None:
        super().__init__(config, image_shape, condition_kind)
        self.mask_token = TokenBias(config.dim)
        self.fusion = nn.Linear(2 * config.dim, config.dim)

    def draw_dropout(self, seed: int, samples: Tensor, attempt: int = 0, steps_left: int | None = None) -> None:
        super().draw_dropout(seed, samples, attempt, steps_left)
        probability = cast(SprintConfig, self.config.routing).path_drop
        self._path_dropped = philox.uniform(seed, "path_drop", samples, attempt) < probability

    def join(self, before: Tensor, x: Tensor, kept: Tensor | None) -> Tensor:
        if self._without_path:
            x = self.mask_token(torch.zeros_like(before))
        elif self.training and self._path_dropped is not None:
            mask = self.mask_token(torch.zeros_like(before))  # [B, T, D]
            x = x if kept is None else _into_places(mask, x, kept)
            x = torch.where(self._path_dropped[:, None, None], mask, x)
        return self.fusion(torch.cat((before, x), dim=-1))

    def init_weights(self) -> None:
        super().init_weights()
        nn.init.zeros_(self.mask_token.weight)


ROUTED: dict[str, type[TreadDiT]] = {"tread": TreadDiT, "sprint": SprintDiT}


def kept_tokens(keep: float, num_tokens: int) -> int:
    """Number of tokens kept: T - int(T (1 - keep)), as published, at least one."""
    return max(math.ceil(round(keep * num_tokens, 6)), 1)


def _of_places(x: Tensor, places: Tensor, dim: int) -> Tensor:
    """Tokens at places [B, k], of x [B, ..., T, D] with the tokens along a dimension: [B, ..., k, D]."""
    index = places.view(len(places), *[1] * (dim - 1), -1, 1)
    return x.gather(dim, index.expand(*x.shape[:dim], -1, x.shape[-1]))


def _into_places(x: Tensor, tokens: Tensor, places: Tensor) -> Tensor:
    """Put tokens [B, k, D] to places [B, k] of x [B, T, D]."""
    return x.scatter(1, places[..., None].expand(tokens.shape), tokens.to(x.dtype))
