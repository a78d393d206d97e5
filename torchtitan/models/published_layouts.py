"""Contract of a published layout: weights of a family under the names, orders and shapes of other code.

A family names its layouts in `ModelFamily.layouts`; `scripts/checkpoint.py` exports and imports through them.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Self

from torch import Tensor


class ConversionError(Exception):
    """Weights that do not fit the other layout; one line per problem."""


class ComputedTensors(Mapping[str, Tensor]):
    """Tensors by name, each computed when asked for: many gigabytes need not be in memory at once."""

    def __init__(self, tensors: Mapping[str, tuple[tuple[int, ...], Callable[[], Tensor]]]) -> None:
        """`tensors` gives the shape of each, and what computes it."""
        self.shapes = {name: tuple(shape) for name, (shape, _) in tensors.items()}
        self._compute = {name: compute for name, (_, compute) in tensors.items()}

    def __getitem__(self, name: str) -> Tensor:
        return self._compute[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


class PublishedLayout(ABC):
    """Published layout of a family's weights.

    Attributes:
        convention: what the code of the layout gives its network as time and reads from it, which weights do not show.
        folder_files: names of the weights in a folder, the first for export; none: the layout is a file alone.
        unrounded: published names of tensors that are no weights, and keep their dtype.
        advice: what to do with a file of other objects than tensors; "" if nothing is known.
        latents: channels -> shift and scale of the latents that the published network of so many channels is for.
    """

    convention: str
    folder_files: ClassVar[tuple[str, ...]] = ()
    unrounded: ClassVar[frozenset[str]] = frozenset()
    advice: ClassVar[str] = ""
    latents: ClassVar[Mapping[int, tuple[float, float]]] = {}

    def at(self, sigma_data: float) -> Self:
        """This layout for a network with EDM's preconditioning at a deviation of the data."""
        return self

    def constants(self, model: Any) -> dict[str, Any]:
        """Values of the published network that tensors do not show, by dotted key of the configuration."""
        return {}

    @abstractmethod
    def export_weights(self, weights: Mapping[str, Tensor], model: Any) -> tuple[Mapping[str, Tensor], list[str]]:
        """Export weights.

        Args:
            weights: every parameter and saved buffer of `model` by name.
            model: gives the shapes; may be on the meta device.

        Returns:
            the published state dict, its tensors contiguous and sharing memory with nothing, `ComputedTensors` if it is
            large, and a line for each omission.

        Raises:
            ConversionError: the layout cannot represent this model.
        """

    @abstractmethod
    def import_weights(self, published: dict[str, Tensor], model: Any) -> tuple[Mapping[str, Tensor], list[str]]:
        """Import weights.

        Args:
            model: gives the shapes; may be on the meta device.

        Returns:
            every parameter and saved buffer of `model` by name, `ComputedTensors` if they are large, and a line for each
            omission.

        Raises:
            ConversionError: tensors are missing, superfluous, of another model, or against this model's computation.
        """

    def settings(self, published: Mapping[str, Tensor], document: Mapping[str, Any]) -> dict[str, dict[str, Any]] | None:
        """Configuration of the model that published tensors are of, as tables of TOML without `[data]`'s name.

        Args:
            document: config.json beside it; empty for a file alone.

        Returns:
            tables model, objective, sampling, and data with shape and num_classes; None where the tensors are no
            model of a named size in this layout.
        """
        return None

    def problems(self, model: Any) -> list[str]:
        """Reasons why the layout cannot represent a model: one line each, empty if it can."""
        return []

    def approximation(self, model: Any) -> str:
        """Difference from the layout's network that an export has to accept, and how to train without; "" if none."""
        return ""

    def folder_config(self, model: Any) -> dict:
        """Content of config.json beside the weights, where the layout is a folder."""
        return {}

    def folder_config_problems(self, document: dict, model: Any) -> list[str]:
        """Differences between a config.json and this model that weights do not show: one line each."""
        return []
