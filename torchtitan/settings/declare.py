"""Declaration of a section's keys: dataclass fields with a description and a range.

Sections are plain dataclasses in files that do not import the configured classes (a folder's config.py), so that
checking a configuration imports nothing heavy; `torchtitan.config.job` turns them into a validated schema, `--help`
text and the JSON schema. This file imports the standard library only, so that every package may use it.
"""

import dataclasses
import types
import typing
from collections.abc import Callable, Mapping
from typing import Annotated as OneOf  # OneOf[str, SOLVERS]: the names in a registry, read by `key_types`
from typing import Any, Literal


def key_types(section: Any) -> dict[str, Any]:
    """Types of a section's keys by name; of names in a registry, the Literal of those that it has now."""
    return {name: _with_names(hint) for name, hint in typing.get_type_hints(section, include_extras=True).items()}


def _with_names(hint: Any) -> Any:
    if typing.get_origin(hint) is OneOf:
        return Literal[tuple(hint.__metadata__[0])]
    if typing.get_origin(hint) is list:
        return list[_with_names(typing.get_args(hint)[0])]  # type: ignore[misc]  # computed
    return hint


def setting(
    default: Any, description: str, *, ge: float | None = None, gt: float | None = None, le: float | None = None,
    lt: float | None = None, applies: Mapping[str, tuple | str] | None = None, because: str = "",
    trajectory: bool = True, writes: Literal["", "run", "shared"] = "", path: bool = False,
) -> Any:  # fmt: skip
    """Declare one configuration key as a `dataclasses.Field` with all of this in its metadata.

    Args:
        default: value when the key is not given; a list or dict is copied for every instance.
        ge, gt, le, lt: bounds of a number (inclusive, exclusive, inclusive, exclusive).
        applies: other key -> the values of it under which this one has an effect, or ">0" for any positive
            number, or "set" for any list but the empty one; given under another value, this key is refused instead of
            ignored. A key without a dot is of the same section. "one or other" is met when either is.
        because: reason why it has no effect otherwise, if that is not obvious; printed with the refusal.
        trajectory: whether a change of this key changes the training, so that a checkpoint of another value must not be
            resumed silently.
        writes: kind of the place that this key names: files of one run alone, a folder that runs may share, or nothing.
            Programs that start several runs keep these places within their own folder (`torchtitan.config.places`).
        path: whether the value is a path, or a name that may be one; `~` at its beginning is expanded.
    """
    metadata = {
        "description": description,
        "bounds": {name: bound for name, bound in dict(ge=ge, gt=gt, le=le, lt=lt).items() if bound is not None},
        "applies": applies or {},
        "because": because,
        "trajectory": trajectory,
        "writes": writes,
        "path": path,
    }
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class Choice:
    """Choice: a section whose keys depend on its key `name`.

    Attributes:
        registry: name -> entry; read anew each time, so that an entry may be added.
        flavors: entry -> named sets of default values, of which the section's key `flavor` chooses one; usually none.
    """

    registry: Mapping[str, Any]
    default: str
    make: Callable[[Any], Any] = lambda entry: entry()
    flavors: Callable[[Any], Mapping[str, Any]] = lambda entry: {}

    def section(self, name: str, flavor: str | None = None) -> Any:
        """Section of a name, and of a flavor or the default one, with default values. Raises KeyError."""
        made, flavors = self.make(self.registry[name]), self.flavors(self.registry[name])
        return dataclasses.replace(flavors[flavor or made.flavor] if flavors else made, name=name)


def choice(
    options: Choice, description: str, *, applies: Mapping[str, tuple | str] | None = None, trajectory: bool = True
) -> Any:
    """Declare a section inside another one, or in the whole configuration, whose `name` chooses its keys.

    `applies` and `trajectory` are as in `setting`, for all of its keys.
    """
    metadata = {"choice": options, "description": description, "applies": applies or {}, "trajectory": trajectory}
    return dataclasses.field(default_factory=lambda: options.section(options.default), metadata=metadata)


def section_of(kind: type, description: str) -> Any:
    """Declare a section of the configuration; description: one line, printed by `--help`."""
    return dataclasses.field(default_factory=kind, metadata={"description": description})


def only_enabled(*but: str) -> Callable[[type], type]:
    """Class decorator of a section: all keys other than `enable` and `but` have an effect only while `enable` is true."""

    def declare(section: type) -> type:
        for field in dataclasses.fields(section):
            if field.name not in ("enable", *but):
                applies = {"enable": (True,)} | field.metadata["applies"]
                field.metadata = types.MappingProxyType({**field.metadata, "applies": applies})
        return section

    return declare


def has_key(section: Any, name: str) -> bool:
    """Check whether a section declares a key of that name."""
    return name in {field.name for field in dataclasses.fields(section)}


def condition_met(value: Any, accepted: tuple | str) -> bool:
    """Check whether a key's value is among those of `applies` under which another one has an effect."""
    if accepted == "set":
        return bool(value)
    return value > 0 if accepted == ">0" else value in accepted
