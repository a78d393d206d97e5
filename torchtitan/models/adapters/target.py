"""Target of a low-rank adapter, and the weights of one."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from torchtitan.files.weight_files import WeightsError


class AdapterError(WeightsError):
    """Adapters that a network cannot have, or a file of them that cannot be used; the message is one line."""


@dataclass(frozen=True, order=True)
class Target:
    """Rows of a layer's weight that have a low-rank update in common.

    Attributes:
        module: qualified name of the layer.
        start, stop: rows of its weight, 0 <= start < stop <= outputs. A layer that published networks have in several
            parts, as one for queries, keys and values, has a target for each.
    """

    module: str
    start: int
    stop: int

    def __str__(self) -> str:
        return f"{self.module}[{self.start}:{self.stop}]"


@dataclass(frozen=True)
class LowRankWeights:
    """Update alpha / rank B A of one target: down A [rank, inputs, ...], up B [outputs, rank]."""

    down: Tensor
    up: Tensor
    alpha: float

    @property
    def rank(self) -> int:
        return self.down.shape[0]

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


AdapterWeights = Mapping[Target, LowRankWeights]
