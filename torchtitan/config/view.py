"""View of a configuration for checks: a check that reads a refused value has no result."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from torchtitan.config.latent_cache import CACHED_DATASETS, trained_info
from torchtitan.data import LATENT_DATASETS, dataset_info
from torchtitan.data.base import DatasetError, DatasetInfo
from torchtitan.settings.schema import Problem
from torchtitan.settings.sections import choices


class RefusedValue(Exception):
    """Refused value read by a check, which then has no result."""


class ConfigView:
    """View of a configuration for checks: `checked.training.steps`; reading a refused value raises RefusedValue.

    Attributes:
        data_ranks: ranks with different images; context parallelism divides the tokens of an image among the others.
        elsewhere: True for a run on another machine: its packages and devices are unknown here.
        has_data: False where the properties of the data were given, and the data are not here.
        origins: dotted key -> where it was set, "file" or "command line".
    """

    def __init__(
        self, config: Any, world_size: int, origins: Mapping[str, str], refused: set[str], elsewhere: bool = False,
        info: DatasetInfo | None = None,
    ) -> None:  # fmt: skip
        self.world_size, self.elsewhere = world_size, elsewhere
        self.data_ranks = max(world_size // config.parallelism.context_parallel_degree, 1)
        self.origins, self.given = origins, set(origins)
        self._config = config
        self._refused = refused
        self._dataset: DatasetInfo | DatasetError | None = info
        self.has_data = info is None

    def __getattr__(self, section: str) -> "_Section":
        return _Section(section, getattr(self._config, section), self._refused)

    @property
    def has_cuda(self) -> bool:
        """True if the run has a CUDA device; of a run elsewhere it is assumed."""
        return self.elsewhere or torch.cuda.is_available()

    def whole(self, section: str) -> Any:
        """Section's dataclass, if no key of it was refused."""
        if any(key.split(".")[0] == section for key in self._refused):
            raise RefusedValue
        return getattr(self._config, section)

    def open_dataset(self) -> DatasetInfo | DatasetError:
        """Open the dataset that the network sees: its properties, or the reason why it cannot be used."""
        if self._dataset is None:
            section = self.whole("data")
            cached = all(map(self.whole, ("cache", "autoencoder", "model", "job"))) and self._config.cache.enable
            if cached and (section.name not in CACHED_DATASETS or self._config.autoencoder.name == "none"):
                raise RefusedValue  # which other checks report
            encodes = cached or self.whole("autoencoder").encode
            if encodes and not cached and (section.name in LATENT_DATASETS or not self._config.autoencoder.statistics):
                raise RefusedValue  # likewise
            try:
                self._dataset = trained_info(self._config) if encodes else dataset_info(section)
            except DatasetError as error:
                self._dataset = error
            except OSError as error:  # a path too long, a folder that may not be read
                self._dataset = DatasetError(f"cannot be read: {error.strerror or error}")
        return self._dataset

    def dataset(self) -> DatasetInfo:
        """Properties of the dataset."""
        found = self.open_dataset()
        if isinstance(found, DatasetError):
            raise RefusedValue
        return found


class _Section:
    def __init__(self, name: str, values: Any, refused: set[str]) -> None:
        self._name, self._values, self._refused = name, values, refused

    def __getattr__(self, key: str) -> Any:
        if {self._name, f"{self._name}.{key}"} & self._refused:
            raise RefusedValue
        value = getattr(self._values, key)
        return _Section(f"{self._name}.{key}", value, self._refused) if key in choices(self._values) else value


def in_section(section: str, found: Iterable[tuple[str, str]]) -> Iterator[Problem]:
    """Problems of keys of a section."""
    return (Problem(f"{section}.{key}", text) for key, text in found)


def nearest_sizes(checked: ConfigView) -> str:
    """Advice of the nearest sides of square images that the patches divide; "" where no key is the side of the input."""
    side, patch = getattr(checked.data, "image_size", None), getattr(checked.model, "patch_size", None)
    if checked.cache.enable or not side or not patch or side % patch == 0:
        return ""
    below = side // patch * patch
    return f" (take --data.image_size {f'{below} or ' if below else ''}{below + patch})"
