"""Layouts of files of adapters: names and shapes under which programs keep them."""

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torchtitan.models.adapters.target import AdapterError, AdapterWeights, LowRankWeights, Target

_PARTS = {"lora_A.weight": "down", "lora_down.weight": "down", "lora_B.weight": "up", "lora_up.weight": "up"}


def are_of_an_adapter(names: Iterable[str]) -> bool:
    """Whether tensors with these names are those of an adapter, in a layout of this program or of another."""
    return any(name.endswith(tuple(_PARTS)) or name.startswith(NATIVE.prefix) for name in names)


@dataclass(frozen=True)
class AdapterLayout(ABC):
    """Layout of adapters of a family's networks.

    Attributes:
        name: by which it is asked for.
        prefix: first part of the names of all its tensors, by which it is recognised.
        down, up: last parts of the names of A and B.
        alphas: whether alpha is written always, for adapters of a scale or rank that readers would not guess, or never,
            and B is scaled instead; or whether it is in a file beside.
        spellings: layouts of other programs with the same layers, which are read and not written.
    """

    name: str
    prefix: str
    down: str
    up: str
    alphas: Literal["always", "where needed", "never", "beside"]
    spellings: "tuple[AdapterLayout, ...]" = field(default=(), kw_only=True)

    def layers(self, model: Any) -> Collection[str]:
        """Its names of the layers of a network; none where they are not listed."""
        return ()

    def split(self, name: str) -> tuple[str, str]:
        """Layer and part (down, up or alpha) of a tensor's name; the part is "" where it is none of an adapter."""
        endings = {**_PARTS, self.down: "down", self.up: "up", "alpha": "alpha"}
        ending = next((ending for ending in endings if name.endswith(f".{ending}")), "")
        return name.removeprefix(self.prefix).removesuffix(f".{ending}"), endings.get(ending, "")

    @abstractmethod
    def published(self, weights: AdapterWeights, model: Any) -> dict[str, LowRankWeights]:
        """Adapter by the layout's names of layers. Raises AdapterError: it has no names for them."""

    @abstractmethod
    def own(self, published: Mapping[str, LowRankWeights], model: Any) -> dict[Target, LowRankWeights]:
        """Adapter of a network, from the layout's names of layers. Raises AdapterError: it is of another network."""


class NativeLayout(AdapterLayout):
    """Names of this program's own layers, with their rows: `adapter.blocks.0.attention.qkv[0:64].down`."""

    def published(self, weights: AdapterWeights, model: Any) -> dict[str, LowRankWeights]:
        return {str(target): values for target, values in weights.items()}

    def own(self, published: Mapping[str, LowRankWeights], model: Any) -> dict[Target, LowRankWeights]:
        found = {}
        for name, values in published.items():
            match = re.fullmatch(r"(.+)\[(\d{1,9}):(\d{1,9})\]", name)
            if match is None or int(match[2]) >= int(match[3]):
                raise AdapterError(f"{self.prefix}{name} names no rows, as layer[0:64] does")
            found[Target(match[1], int(match[2]), int(match[3]))] = values
        return found


NATIVE = NativeLayout("native", "adapter.", "down", "up", "always")
