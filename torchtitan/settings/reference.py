"""All sections and keys, for a person (`--help`) and for an editor (a JSON schema)."""

import dataclasses
import textwrap
import typing
from typing import Any

import pydantic

from torchtitan.settings.schema import range_name, schema_of, shown, type_name


class Choice(typing.NamedTuple):
    """A section whose class depends on its `name` key.

    Attributes:
        defaults: name -> the section with its defaults.
        flavors: name -> the names of its presets, which are more sets of defaults.
    """

    defaults: dict[str, Any]
    flavors: dict[str, list[str]]


def describe(sections: dict[str, Any]) -> str:
    """Describe every key: type, range, default, meaning.

    Args:
        sections: name -> the section with its defaults, or a Choice; the first of a Choice is the default one.
    """
    parts = [
        "Settings, on the command line as --section.key value or --section.key=value, in a TOML file as key = value\n"
        "under [section]; the command line overrides the file that --job.config_file names. Booleans take true or\n"
        "false; lists, and lists of tables, are JSON on the command line.\n\n"
        "  --help        print this and exit\n"
        "  --check-only  check the configuration and exit"
    ]
    for section, defaults in sections.items():
        if isinstance(defaults, Choice):
            for name, instance in defaults.defaults.items():
                title = f"[{section}] with {section}.name = {name}"
                flavors = defaults.flavors.get(name)
                note = f"{section}.flavor is one of {', '.join(flavors)}" if flavors else ""
                parts.append(_describe_section(title, section, instance, note))
        else:
            parts.append(_describe_section(f"[{section}]", section, defaults))
    return "\n\n".join(parts) + "\n"


def build_json_schema(sections: dict[str, Any]) -> dict[str, Any]:
    """The JSON schema (draft 7) of a TOML file, for completion and checking in editors. Args as `describe`."""
    members: dict[str, Any] = {}
    for section, defaults in sections.items():
        instances = list(defaults.defaults.values()) if isinstance(defaults, Choice) else [defaults]
        members |= {f"{section}.{index}": schema_of(instance.__class__) for index, instance in enumerate(instances)}
    inputs: list[Any] = [(key, "validation", pydantic.TypeAdapter(member)) for key, member in members.items()]
    references, definitions = pydantic.TypeAdapter.json_schemas(inputs)
    properties = {}
    for section, defaults in sections.items():
        if not isinstance(defaults, Choice):
            properties[section] = references[f"{section}.0", "validation"]
            continue
        for index, name in enumerate(defaults.defaults):
            reference = references[f"{section}.{index}", "validation"]
            _narrow(
                definitions["$defs"][reference["$ref"].rsplit("/", 1)[1]], name, index == 0, defaults.flavors.get(name)
            )
            properties.setdefault(section, {"anyOf": []})["anyOf"].append(reference)
    for definition in definitions["$defs"].values():
        for details in definition["properties"].values():
            details.pop("title", None)  # the key's name again
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Run configuration",
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
        **definitions,
    }


def _narrow(definition: dict[str, Any], name: str, is_default: bool, flavors: list[str] | None) -> None:
    """Make one alternative of a section valid under its name only."""
    definition["properties"]["name"] |= {"const": name, "default": name}
    if not is_default:
        definition["required"] = ["name"]
    if flavors:
        definition["properties"]["flavor"]["enum"] = flavors
        for key, details in definition["properties"].items():
            if key not in ("name", "flavor"):
                details.pop("default", None)  # it depends on the flavor


def _describe_section(title: str, section: str, defaults: Any, note: str = "") -> str:
    lines = [title, *_wrapped(note, 2)]
    hints = typing.get_type_hints(type(defaults))
    for field in dataclasses.fields(defaults):
        lines.append(f"  --{section}.{field.name}  {_kind(field, hints[field.name], getattr(defaults, field.name))}")
        lines.extend(_meaning(field, section, 6))
        element = (*typing.get_args(hints[field.name]), None)[0]
        if dataclasses.is_dataclass(element):
            element_hints = typing.get_type_hints(element)
            for inner in dataclasses.fields(element):
                lines.append(f"      {inner.name}  {_kind(inner, element_hints[inner.name], inner.default)}")
                lines.extend(_meaning(inner, "", 10))
    return "\n".join(lines)


def _kind(field: dataclasses.Field, annotation: Any, default: Any) -> str:
    extent = range_name(field.metadata.get("bounds", {}))
    return f"{type_name(annotation)}{', ' + extent if extent else ''} (default {_default_text(default)})"


def _default_text(default: Any) -> str:
    if default is None:
        return "none"
    if isinstance(default, list):
        return "[" + ", ".join(map(_default_text, default)) + "]"
    if dataclasses.is_dataclass(default):
        keys = (field.name for field in dataclasses.fields(default))
        return "{" + ", ".join(f"{key} = {_default_text(getattr(default, key))}" for key in keys) + "}"
    if isinstance(default, str):
        return default or '""'
    return shown(default)


def _meaning(field: dataclasses.Field, section: str, indent: int) -> list[str]:
    conditions = []
    for key, accepted in field.metadata.get("applies", {}).items():
        alternatives = key.split(" or ")
        name = " or ".join(each if "." in each or not section else f"{section}.{each}" for each in alternatives)
        named = {">0": "above 0", "set": "is set"}
        values = named[accepted] if isinstance(accepted, str) else "= " + " or ".join(map(_default_text, accepted))
        conditions.append(f"{name} {values}")
    text = field.metadata.get("description", "") + (f"; only with {' and '.join(conditions)}" if conditions else "")
    return _wrapped(text, indent)


def _wrapped(text: str, indent: int) -> list[str]:
    margin = " " * indent
    return textwrap.wrap(text, 110, initial_indent=margin, subsequent_indent=margin, break_on_hyphens=False)
