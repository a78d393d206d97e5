"""Layers with low-rank adapters: each keeps its parameters under their names, and adds the updates of its adapters.

    y = W x + w s B A x      s = alpha / rank, w the adapter's multiple, A [rank, inputs], B [outputs, rank]

A linear adds the update to its output, and needs no gradient of W. A convolution, a table of embeddings (its rows are
the outputs) and a layer that normalises its weight add it to the raw weight instead, so that a merged weight is the same
function.

Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", arXiv 2106.09685, section 4.1.
"""

from collections.abc import Iterator
from typing import Any, NoReturn, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan.models.adapters.target import AdapterError
from torchtitan.models.magnitude import MPConv2d, MPLinear
from torchtitan.models.quantized import QuantizedLinear, QuantizedWeight


class LowRank(nn.Module):
    """Low-rank update of rows [start, stop) of a weight.

    Attributes:
        down: A, [rank, inputs, ...], float32.
        up: B, [stop - start, rank], float32.
        alpha: the update is scaled by alpha / rank.
        training_weight, sampling_weight: multiples of the update in train mode and in eval mode.
    """

    def __init__(
        self, start: int, stop: int, inputs: tuple[int, ...], *, rank: int, alpha: float,
        device: torch.device, training_weight: float = 1.0, sampling_weight: float = 1.0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.start, self.stop, self.alpha = start, stop, alpha
        self.training_weight, self.sampling_weight = training_weight, sampling_weight
        self.down = nn.Parameter(torch.empty(rank, *inputs, device=device))
        self.up = nn.Parameter(torch.empty(stop - start, rank, device=device))

    @property
    def rank(self) -> int:
        return self.down.shape[0]

    @property
    def strength(self) -> float:
        """Multiple of B A in the present mode."""
        return (self.training_weight if self.training else self.sampling_weight) * self.alpha / self.rank

    def forward(self, x: Tensor) -> Tensor:
        """Update of the output [..., stop - start] for inputs [..., inputs]."""
        if not torch.is_autocast_enabled(x.device.type):
            x = x.to(self.down.dtype)
        return F.linear(F.linear(x, self.down), self.up) * self.strength

    def of_weight(self) -> Tensor:
        """Update of the weight's rows [stop - start, inputs, ...]."""
        return (self.up @ self.down.flatten(1) * self.strength).unflatten(1, self.down.shape[1:])


class AdaptedLayer(nn.Module):
    """Layer with adapters: name -> updates of different rows, ascending."""

    weight: Any  # a parameter; the layers that are replaced declare it differently

    def _adopt(self, layer: nn.Module) -> None:
        nn.Module.__init__(self)
        kept = {key: value for key, value in vars(layer).items() if key not in vars(self)}
        self.__dict__.update(kept)
        for name, parameter in layer._parameters.items():
            self.register_parameter(name, parameter)
        for name, module in layer._modules.items():
            self.register_module(name, module)
        self.adapters = nn.ModuleDict()
        self.train(layer.training)

    def add(self, name: str, update: LowRank) -> None:
        """Add an update to the adapter of that name. Raises AdapterError: it has one of the same rows."""
        if name not in self.adapters:
            self.adapters[name] = nn.ModuleList()
        pieces = cast(nn.ModuleList, self.adapters[name])
        if any(other.start < update.stop and update.start < other.stop for other in cast(list[LowRank], pieces)):
            raise AdapterError(f"rows {update.start} to {update.stop} of a layer overlap others of the same adapter")
        update.train(self.training)  # the mode chooses its multiple
        self.adapters[name] = nn.ModuleList(sorted([*pieces, update], key=lambda piece: cast(int, piece.start)))

    def updates(self) -> Iterator[list[LowRank]]:
        """Updates of each adapter that counts in the present mode."""
        for pieces in self.adapters.values():
            found = [piece for piece in cast(list[LowRank], pieces) if piece.strength]
            if found:
                yield found

    def update_of_weight(self) -> Tensor | None:
        """Sum of all updates, of the shape of the weight; None where no adapter counts."""
        if isinstance(self.weight, QuantizedWeight):
            refuse_merging(self.weight)
        rows, total = self.weight.shape[0], None
        for pieces in self.updates():
            whole = _of_all_rows(pieces, [piece.of_weight() for piece in pieces], rows, dim=0)
            total = whole if total is None else total + whole
        return total

    def adapted_weight(self) -> Tensor:
        """Raw weight with all updates."""
        update = self.update_of_weight()
        return self.weight if update is None else self.weight + update.to(self.weight.dtype)


class AdaptedLinear(AdaptedLayer, nn.Linear):
    """Linear with adapters."""

    def __init__(self, linear: nn.Linear) -> None:
        self._adopt(linear)

    def forward(self, x: Tensor) -> Tensor:
        y = self.product(x)
        for pieces in self.updates():
            y = y + _of_all_rows(pieces, [piece(x) for piece in pieces], self.out_features, dim=-1).to(y.dtype)
        return y

    def product(self, x: Tensor) -> Tensor:
        """Output of the frozen weight and bias alone."""
        return F.linear(x, self.weight, self.bias)


class AdaptedQuantizedLinear(AdaptedLinear):
    """Linear with a quantised weight and adapters."""

    def product(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.weight.product(x, self.bias))


class AdaptedMPLinear(AdaptedLayer, MPLinear):
    """Linear that preserves magnitudes, with adapters of its raw weight."""

    def __init__(self, linear: MPLinear) -> None:
        self._adopt(linear)

    def raw_weight(self) -> Tensor:
        return self.adapted_weight()


class AdaptedMPConv2d(AdaptedLayer, MPConv2d):
    """Convolution that preserves magnitudes, with adapters of its raw weight."""

    def __init__(self, convolution: MPConv2d) -> None:
        self._adopt(convolution)

    def raw_weight(self) -> Tensor:
        return self.adapted_weight()


class AdaptedConv2d(AdaptedLayer, nn.Conv2d):
    """Convolution with adapters."""

    def __init__(self, convolution: nn.Conv2d) -> None:
        self._adopt(convolution)

    def forward(self, x: Tensor) -> Tensor:
        return self._conv_forward(x, self.adapted_weight(), self.bias)


class AdaptedEmbedding(AdaptedLayer, nn.Embedding):
    """Table of embeddings with adapters."""

    def __init__(self, table: nn.Embedding) -> None:
        self._adopt(table)

    def forward(self, numbers: Tensor) -> Tensor:
        return F.embedding(numbers, self.adapted_weight())


ADAPTED = {
    nn.Linear: AdaptedLinear, MPLinear: AdaptedMPLinear, MPConv2d: AdaptedMPConv2d, nn.Conv2d: AdaptedConv2d,
    nn.Embedding: AdaptedEmbedding, QuantizedLinear: AdaptedQuantizedLinear,
}  # fmt: skip


def refuse_merging(weight: QuantizedWeight) -> NoReturn:
    """Raise AdapterError: a quantised weight would round the update away."""
    raise AdapterError(
        f"lora.base_dtype: a weight in {weight.kind} cannot take adapters into itself (export the adapter, or,"
        ' on a base that is a file, set it to "bfloat16" in the config.toml of a copy of the run)'
    )


def _of_all_rows(pieces: list[LowRank], values: list[Tensor], rows: int, dim: int) -> Tensor:
    """Join updates of some rows along a dimension, zeros between them."""
    if len(pieces) == 1 and pieces[0].stop - pieces[0].start == rows:
        return values[0]
    joined, row = [], 0
    for piece, value in zip(pieces, values, strict=True):
        joined += [_zeros(value, piece.start - row, dim), value]
        row = piece.stop
    joined.append(_zeros(joined[-1], rows - row, dim))
    return torch.cat([part for part in joined if part.shape[dim]], dim=dim)


def _zeros(like: Tensor, size: int, dim: int) -> Tensor:
    shape = list(like.shape)
    shape[dim] = size
    return like.new_zeros(shape)
