"""Sections of a configuration, and those inside of them: `objective`, `objective.timesteps`."""

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

from torchtitan.settings import Choice


def choices(section: Any) -> dict[str, Choice]:
    """Choices by name, of each section inside a section or configuration whose keys depend on a name."""
    found = {field.name: field.metadata.get("choice") for field in dataclasses.fields(section)}
    return {name: options for name, options in found.items() if options is not None}


def keys(section: Any) -> list[dataclasses.Field]:
    """Keys of a section: its fields that are no sections."""
    return [field for field in dataclasses.fields(section) if "choice" not in field.metadata]


def all_sections(config: Any) -> Iterator[tuple[str, Any]]:
    """All sections: dotted name and values, those inside of one following directly."""
    for field in dataclasses.fields(config):
        yield from _with_inner(field.name, getattr(config, field.name))


def section_at(config: Any, name: str) -> Any:
    """Section of a dotted name."""
    return functools.reduce(getattr, name.split("."), config)


def put_section(config: Any, name: str, section: Any) -> None:
    """Replace the section of a dotted name."""
    outer, _, last = name.rpartition(".")
    setattr(section_at(config, outer) if outer else config, last, section)


def table_at(tables: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Table of a dotted name in the tables of a TOML file; empty where there is none."""
    found: Any = tables
    for part in name.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    return found if isinstance(found, dict) else {}


def flattened(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Flatten tables of tables to dotted keys and values."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from flattened(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def filled_in(section: Any, table: Mapping[str, Any]) -> Any:
    """Fill a section and inner ones, unchecked. Raises KeyError, TypeError, AttributeError: another's table."""
    inner = {}
    for name, options in choices(section).items():
        given = table.get(name, {})
        inner[name] = filled_in(options.section(given.get("name", options.default)), given)
    return dataclasses.replace(section, **(dict(table) | inner))


def _with_inner(name: str, section: Any) -> Iterator[tuple[str, Any]]:
    yield name, section
    for inner in choices(section):
        yield from _with_inner(f"{name}.{inner}", getattr(section, inner))
