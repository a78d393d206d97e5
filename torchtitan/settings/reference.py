"""Reference of all sections and keys, for readers (`--help`) and for editors (a JSON schema)."""

import dataclasses
import textwrap
import typing
from collections.abc import Sequence
from typing import Any

import pydantic

from torchtitan.settings import Choice, has_key, key_types
from torchtitan.settings.schema import quoted, range_name, schema_of, shown_name, type_name
from torchtitan.settings.sections import choices, keys
from torchtitan.settings.sources import suggestion

_INTRODUCTION = """\
Settings, on the command line as --section.key value or --section.key=value, in a TOML file as key = value
under [section]; the command line overrides the file. Booleans take true or false; lists, and lists of
tables, are JSON on the command line.

Sections:
"""


class UnknownTopic(Exception):
    """Name that is no section and no key; the message is one line."""


class _Section(typing.NamedTuple):
    field: dataclasses.Field  # of the configuration or section that it is in
    declared: Any  # the section with its defaults, or a Choice


def describe(config: Any, topics: Sequence[str] = ()) -> str:
    """Describe a configuration: its sections in a line each, or the keys of some topics in full.

    Args:
        topics: a section (`optimizer`), its keys under one name (`data.webdataset`), or a key (`optimizer.lr`).

    Raises:
        UnknownTopic: one of them is none of these.
    """
    sections = _with_inner(config)
    if not topics:
        width = max(map(len, sections)) + 2
        return _INTRODUCTION + "".join(
            f"  {name:{width}}{section.field.metadata['description']}{_count_of_names(section.declared)}\n"
            for name, section in sections.items()
        )
    texts = _texts(sections)
    if unknown := [topic for topic in topics if topic not in texts]:
        advice = suggestion(unknown[0], texts)
        raise UnknownTopic(f"--help {shown_name(unknown[0])}: no such section or key ({advice})")
    return "\n\n".join(texts[topic] for topic in dict.fromkeys(topics)) + "\n"


def _count_of_names(declared: Any) -> str:
    names = len(_alternatives(declared))
    return f" (name: one of {names})" if names > 1 else ""


def _texts(sections: dict[str, _Section]) -> dict[str, str]:
    """Texts: topic -> its description, of every section, name of one, and key."""
    texts = {}
    for section, (of_section, declared) in sections.items():
        parts: dict[str, str] = {}
        with_key: dict[str, dict[str, list[str]]] = {}  # key -> description -> the names that bring it
        for name, instance in _alternatives(declared).items():
            flavors = declared.flavors(declared.registry[name]) if name else {}
            note = f"{section}.flavor is one of {', '.join(flavors)}" if flavors else ""
            described = {field.name: _describe_key(section, instance, field) for field in keys(instance)}
            if name:
                del described["name"]  # described once, with the section
            parts[f"{section}.{name}"] = "\n".join((_title(section, [name]), *_wrapped(note, 2), *described.values()))
            for key, text in described.items():
                with_key.setdefault(key, {}).setdefault(text, []).append(name)
        inner = [name for name in sections if name.startswith(f"{section}.")]
        more = [f"  more keys: --help {' '.join(inner)}"] if inner else []
        first = [f"[{section}]\n{_describe_name(section, of_section, declared)}"] if isinstance(declared, Choice) else []
        texts[section] = "\n\n".join((*first, *(part for part in parts.values() if "\n" in part), *more))
        texts |= parts | {f"{section}.name": first[0]} if first else {}
        for key, variants in with_key.items():
            titled = (f"{_title(section, names)}\n{text}" for text, names in variants.items())
            texts[f"{section}.{key}"] = "\n\n".join(titled)
    return texts


def _title(section: str, names: list[str]) -> str:
    return f"[{section}] with {section}.name = {' or '.join(names)}" if names != [""] else f"[{section}]"


def build_json_schema(config: Any) -> dict[str, Any]:
    """JSON schema (draft 7) of a TOML file, for completion and checks in editors; config: with its defaults."""
    every = {name: section.declared for name, section in _with_inner(config).items()}
    instances = {section: _alternatives(declared) for section, declared in every.items()}
    classes: dict[Any, None] = {type(instance): None for found in instances.values() for instance in found.values()}
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


def _with_inner(config: Any, prefix: str = "") -> dict[str, _Section]:
    """Sections with inner ones: dotted name -> section or Choice, those inside of any alternative following directly."""
    found: dict[str, _Section] = {}
    for field in dataclasses.fields(config):
        declared = choices(config).get(field.name, getattr(config, field.name))
        if not (isinstance(declared, Choice) or dataclasses.is_dataclass(declared)):
            continue
        found[prefix + field.name] = _Section(field, declared)
        for instance in _alternatives(declared).values():
            found |= _with_inner(instance, f"{prefix}{field.name}.")
    return found


def _alternatives(declared: Any) -> dict[str, Any]:
    """Alternatives: name -> section, of a Choice with the default one first; a section alone has no name."""
    if not isinstance(declared, Choice):
        return {"": declared}
    names = sorted(declared.registry, key=lambda name: name != declared.default)
    return {name: declared.section(name) for name in names}


def _narrow(definition: dict[str, Any], name: str, options: Choice, is_default: bool) -> None:
    """Narrow an alternative of a section to be valid under its name only."""
    definition["properties"]["name"] |= {"const": name, "default": name}
    if not is_default:
        definition["required"] = ["name"]
    if flavors := options.flavors(options.registry[name]):
        definition["properties"]["flavor"]["enum"] = list(flavors)
        for key, details in definition["properties"].items():
            if key not in ("name", "flavor"):
                details.pop("default", None)  # it depends on the flavor


def _describe_key(section: str, defaults: Any, field: dataclasses.Field) -> str:
    """Describe a key: name, type, bounds, default and meaning, and those of its tables' keys."""
    annotation = key_types(type(defaults))[field.name]
    lines = [f"  --{section}.{field.name}  {_kind(field, annotation, getattr(defaults, field.name))}"]
    lines.extend(_meaning(field, section, 6))
    element = (*typing.get_args(annotation), None)[0]
    if dataclasses.is_dataclass(element):
        hints = key_types(element)
        for inner in dataclasses.fields(element):
            lines.append(f"      {inner.name}  {_kind(inner, hints[inner.name], inner.default)}")
            lines.extend(_meaning(inner, "", 10))
    return "\n".join(lines)


def _describe_name(section: str, of_section: dataclasses.Field, options: Choice) -> str:
    """Describe the key that chooses the others of a section, with the conditions on the section."""
    field = options.section(options.default).__dataclass_fields__["name"]
    kind = f"--{section}.name  one of {', '.join(options.registry)} (default {options.default})"
    lines = textwrap.wrap(kind, 110, initial_indent="  ", subsequent_indent="      ")
    text = field.metadata["description"] + _conditions(of_section, section.rpartition(".")[0])
    return "\n".join((*lines, *_wrapped(text, 6)))


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
    return quoted(default)


def _meaning(field: dataclasses.Field, section: str, indent: int) -> list[str]:
    return _wrapped(field.metadata.get("description", "") + _conditions(field, section), indent)


def _conditions(field: dataclasses.Field, section: str) -> str:
    conditions = []
    for key, accepted in field.metadata.get("applies", {}).items():
        alternatives = key.split(" or ")
        name = " or ".join(each if "." in each or not section else f"{section}.{each}" for each in alternatives)
        named = {">0": "above 0", "set": "is set"}
        values = named[accepted] if isinstance(accepted, str) else "= " + " or ".join(map(_default_text, accepted))
        conditions.append(f"{name} {values}")
    return f"; only with {' and '.join(conditions)}" if conditions else ""


def _wrapped(text: str, indent: int) -> list[str]:
    margin = " " * indent
    return textwrap.wrap(text, 110, initial_indent=margin, subsequent_indent=margin, break_on_hyphens=False)
