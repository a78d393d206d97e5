"""Registry: what a key `name` chooses from, of which a run imports what it names."""

import logging
import os
from collections.abc import Iterator, Mapping, MutableMapping
from importlib import import_module
from typing import Any, TypeVar, cast, get_args

logger = logging.getLogger(__name__)

Entry = TypeVar("Entry")


class Registry(MutableMapping[str, Entry]):
    """Entries by name, each imported when it is first read; the names alone import nothing."""

    def __init__(self, package: str, places: Mapping[str, str], kind: Any = object) -> None:
        """Register the program's entries.

        Args:
            package: of the entries.
            places: name -> place in the package, as "cifar10.Cifar10" of `Cifar10` in cifar10.py.
            kind: class of entries that a plugin adds, `type[C]` where they are subclasses of C.
        """
        self._package = package
        self._kind = kind
        self._places = dict(places)
        self._entries: dict[str, Entry] = {}

    def __getitem__(self, name: str) -> Entry:
        if name not in self._entries:
            file, attribute = self._places[name].rsplit(".", 1)
            self._entries[name] = cast(Any, getattr(import_module(f"{self._package}.{file}"), attribute))
        return self._entries[name]

    def __setitem__(self, name: str, entry: Entry) -> None:
        """Add an entry. Raises TypeError: it is of another kind, or a class that lacks a method or `Config`."""
        _check(name, entry, self._kind)
        if self._places.get(name) and os.environ.get("RANK", "0") == "0":
            given = getattr(entry, "__name__", type(entry).__name__)
            logger.warning(f"{name}: a plugin's {given} takes the place of the program's")
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


def _check(name: str, entry: Any, kind: Any) -> None:
    bases = get_args(kind)
    if not bases:
        if not isinstance(entry, kind):
            raise TypeError(f"the entry {name!r} has to be a {kind.__name__}")
        return
    if not (isinstance(entry, type) and issubclass(entry, bases)):
        raise TypeError(f"the entry {name!r} has to be a class that inherits {bases[0].__name__}")
    lacking = {*getattr(entry, "__abstractmethods__", ())}
    if "Config" in bases[0].__annotations__ and not hasattr(entry, "Config"):
        lacking.add("Config")
    if lacking:
        raise TypeError(f"{entry.__name__} lacks {', '.join(sorted(lacking))}")
