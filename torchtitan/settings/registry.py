"""Registry: what a key `name` chooses from, of which a run imports what it names."""

from collections.abc import Iterator, Mapping, MutableMapping
from importlib import import_module
from typing import Any, TypeVar, cast

Entry = TypeVar("Entry")


class Registry(MutableMapping[str, Entry]):
    """Entries by name, each imported when it is first read; the names alone import nothing."""

    def __init__(self, package: str, places: Mapping[str, str]) -> None:
        """package: of the entries. places: name -> place in it, as "cifar10.Cifar10" of `Cifar10` in cifar10.py."""
        self._package = package
        self._places = dict(places)
        self._entries: dict[str, Entry] = {}

    def __getitem__(self, name: str) -> Entry:
        if name not in self._entries:
            file, attribute = self._places[name].rsplit(".", 1)
            self._entries[name] = cast(Any, getattr(import_module(f"{self._package}.{file}"), attribute))
        return self._entries[name]

    def __setitem__(self, name: str, entry: Entry) -> None:
        self._places.setdefault(name, "")
        self._entries[name] = entry

    def __delitem__(self, name: str) -> None:
        del self._places[name]
        self._entries.pop(name, None)

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)
