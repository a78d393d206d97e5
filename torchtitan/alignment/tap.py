"""Tap of a network's tokens: the output of a block, before the next one."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torchtitan.errors import ConfigError
from torchtitan.models.base import DiffusionModel, ProbePoint
from torchtitan.models.flops import forward_on_meta


@dataclass(frozen=True)
class TapPlace:
    """Place of a tap in a network.

    Attributes:
        dim: channels D of a token.
        grid: rows and columns of an image's tokens.
    """

    point: ProbePoint
    dim: int
    grid: tuple[int, int]


def find_place(model: DiffusionModel, key: str, block: int) -> TapPlace:
    """Find the place behind a block, from 1, of a network on the meta device.

    Args:
        key: of `[alignment]`, for messages.

    Raises:
        ConfigError: the network has no such block, or its tokens form no grid.
    """
    points = list(model.probe_points().values())
    if block > len(points):
        raise ConfigError([f"alignment.{key}: {block} is no block of the network, which has {len(points)}"])
    tap = Tap(model, points[block - 1])
    with tap.taken(grad=False):
        forward_on_meta(model, 1)
    tap.remove()
    _, tokens, dim = tap.tokens().shape
    _, height, width = model.image_shape
    rows = max(round(math.sqrt(tokens * height / width)), 1)
    if tokens % rows or rows * width != (tokens // rows) * height:
        text = f"{tokens} tokens of an image of {height} x {width} form no grid (choose another block)"
        raise ConfigError([f"alignment.{key}: {text}"])
    return TapPlace(points[block - 1], dim, (rows, tokens // rows))


class Tap:
    """Tap behind a module of a network: keeps its output in the forwards inside of `taken`."""

    def __init__(self, model: nn.Module, point: ProbePoint) -> None:
        """model: as it is called; wrapped for its layout, so that a block that is recomputed is tapped once."""
        self._point, self._wanted, self._grad = point, False, False
        self._output: Any = None
        self.remove = model.get_submodule(point.module).register_forward_hook(self._keep).remove

    @contextmanager
    def taken(self, *, grad: bool) -> Iterator[None]:
        """Take the last output in here; grad: of those that are differentiated."""
        self._wanted, self._grad = True, grad
        try:
            yield
        finally:
            self._wanted = False

    def tokens(self) -> Tensor:
        """Tokens [B, T, D] of the output taken, which is let go."""
        output, self._output = self._output, None
        return self._point.tokens(output)

    def _keep(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if self._wanted and torch.is_grad_enabled() == self._grad:
            self._output = output
