"""A configuration as checks read it: what depends on a value that was itself refused has nothing to say."""

from typing import Any

from data import DATASETS
from data.base import DatasetError, DatasetInfo
from torchtitan.settings.sections import choices


class Unknown(Exception):
    """A check read a value that was itself refused, so the check has nothing to say."""


class Checked:
    """A configuration as checks read it: `checked.training.steps`; reading a refused value raises Unknown.

    Attributes:
        world_size: number of processes.
        given: the dotted keys that were set, in the TOML file or on the command line.
    """

    def __init__(self, config: Any, world_size: int, given: set[str], refused: set[str]) -> None:
        self.world_size = world_size
        self.given = given
        self._config = config
        self._refused = refused
        self._dataset: DatasetInfo | DatasetError | None = None

    def __getattr__(self, section: str) -> "_Section":
        return _Section(section, getattr(self._config, section), self._refused)

    def whole(self, section: str) -> Any:
        """The section's dataclass, if no key of it was refused."""
        if any(key.split(".")[0] == section for key in self._refused):
            raise Unknown
        return getattr(self._config, section)

    def open_dataset(self) -> DatasetInfo | DatasetError:
        """What the dataset holds, or why it cannot be used."""
        if self._dataset is None:
            section = self.whole("data")
            try:
                self._dataset = DATASETS[section.name].info(section)
            except DatasetError as error:
                self._dataset = error
            except OSError as error:  # a path too long, a folder that may not be read
                self._dataset = DatasetError(f"cannot be read: {error.strerror or error}")
        return self._dataset

    def dataset(self) -> DatasetInfo:
        """What the dataset holds."""
        found = self.open_dataset()
        if isinstance(found, DatasetError):
            raise Unknown
        return found


class _Section:
    def __init__(self, name: str, values: Any, refused: set[str]) -> None:
        self._name, self._values, self._refused = name, values, refused

    def __getattr__(self, key: str) -> Any:
        if {self._name, f"{self._name}.{key}"} & self._refused:
            raise Unknown
        value = getattr(self._values, key)
        return _Section(f"{self._name}.{key}", value, self._refused) if key in choices(self._values) else value
