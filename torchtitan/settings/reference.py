"""All sections and keys, for a person (`--help`) and for an editor (a JSON schema)."""

import dataclasses
import textwrap
import typing
from typing import Any

import pydantic

from torchtitan.settings import Choice, has_key
from torchtitan.settings.schema import range_name, schema_of, shown, type_name
from torchtitan.settings.sections import choices, keys


def describe(sections: dict[str, Any]) -> str:
    """Describe every key: type, range, default, meaning.

    Args:
        sections: name -> the section with its defaults, or a Choice of sections.
    """
    parts = [
        "Settings, on the command line as --section.key value or --section.key=value, in a TOML file as key = value\n"
        "under [section]; the command line overrides the file that --job.config_file names. Booleans take true or\n"
        "false; lists, and lists of tables, are JSON on the command line.\n\n"
        "  --help        print this and exit\n"
        "  --check-only  check the configuration and exit"
    ]
    for section, declared in _with_inner(sections).items():
        if not isinstance(declared, Choice):
            parts.append(_describe_section(f"[{section}]", section, declared))
            continue
        for name, instance in _alternatives(declared).items():
            title = f"[{section}] with {section}.name = {name}"
            flavors = declared.flavors(declared.registry[name])
            note = f"{section}.flavor is one of {', '.join(flavors)}" if flavors else ""
            parts.append(_describe_section(title, section, instance, note))
    return "\n\n".join(parts) + "\n"


def build_json_schema(sections: dict[str, Any]) -> dict[str, Any]:
    """The JSON schema (draft 7) of a TOML file, for completion and checking in editors. Args as `describe`."""
    every = _with_inner(sections)
    instances = {section: _alternatives(declared) for section, declared in every.items()}
    classes = {type(instance): None for found in instances.values() for instance in found.values()}
    inputs: list[Any] = [(each, "validation", pydantic.TypeAdapter(schema_of(each))) for each in classes]
    references, definitions = pydantic.TypeAdapter.json_schemas(inputs)
    members = {
        each: definitions["$defs"][reference["$ref"].rsplit("/", 1)[1]] for (each, _), reference in references.items()
    }
    properties: dict[str, Any] = {}
    places = {"": [properties]}  # section -> where references to its inner ones stand, for each of its alternatives
    for section, declared in every.items():
        outer, _, name = section.rpartition(".")
        places[section] = [members[type(instance)]["properties"] for instance in instances[section].values()]
        alternatives = [references[type(instance), "validation"] for instance in instances[section].values()]
        reference = {"anyOf": alternatives} if isinstance(declared, Choice) else alternatives[0]
        for place, instance in zip(places[outer], instances.get(outer, {"": None}).values(), strict=True):
            if instance is None or has_key(instance, name):
                place[name] = reference
    options = [declared for declared in every.values() if isinstance(declared, Choice)]
    defaults = {type(each.section(each.default)) for each in options}  # a class may be an alternative of two choices
    for each in options:
        for name, instance in _alternatives(each).items():
            _narrow(members[type(instance)], name, each, type(instance) in defaults)
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


def _with_inner(sections: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted name -> section or Choice, each with those inside of any of its alternatives right behind it."""
    found: dict[str, Any] = {}
    for name, declared in sections.items():
        found[prefix + name] = declared
        for instance in _alternatives(declared).values():
            found |= _with_inner(choices(instance), f"{prefix}{name}.")
    return found


def _alternatives(declared: Any) -> dict[str, Any]:
    """Name -> section, of a Choice with the default one first; a section alone has no name."""
    if not isinstance(declared, Choice):
        return {"": declared}
    names = sorted(declared.registry, key=lambda name: name != declared.default)
    return {name: declared.section(name) for name in names}


def _narrow(definition: dict[str, Any], name: str, options: Choice, is_default: bool) -> None:
    """Make one alternative of a section valid under its name only."""
    definition["properties"]["name"] |= {"const": name, "default": name}
    if not is_default:
        definition["required"] = ["name"]
    if flavors := options.flavors(options.registry[name]):
        definition["properties"]["flavor"]["enum"] = list(flavors)
        for key, details in definition["properties"].items():
            if key not in ("name", "flavor"):
                details.pop("default", None)  # it depends on the flavor


def _describe_section(title: str, section: str, defaults: Any, note: str = "") -> str:
    lines = [title, *_wrapped(note, 2)]
    hints = typing.get_type_hints(type(defaults))
    for field in keys(defaults):
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
