"""Record of a configuration: keys with an effect, TOML of the resolved one, differences between two."""

import dataclasses
import json
import os
import typing
from collections.abc import Container
from typing import Any, cast

import tomli_w

from torchtitan.settings import condition_met, key_types
from torchtitan.settings.schema import default_of, expanded, toml_value
from torchtitan.settings.sections import all_sections, choices, keys, section_at, table_at

CONFIG_HEADER = "# The resolved configuration of this run; give it as --job.config_file to repeat the run.\n"


def dump_config(config: Any) -> str:
    """Write a resolved JobConfig as TOML: every key that has an effect, sections in their order.

    Loading the text on as many processes gives an equal JobConfig, but for `job.config_file`.
    """
    text = tomli_w.dumps({name: table for name, table in effective(config).items() if table})
    return CONFIG_HEADER + text


def config_differences(old: Any, new: Any, also: tuple[str, ...] = ()) -> list[str]:
    """Compare the keys that determine the training of two configurations.

    Args:
        old: a JobConfig, or the tables of a config.toml, which may lack keys or have ones that exist no more.
        also: beginnings of sections that are compared although they do not determine the training.

    Returns:
        one line per key of another value, as `training.steps: 100 -> 200`. A key missing there has its default.
    """
    before = old if isinstance(old, dict) else effective(old)
    now = effective(new)
    lines = []
    for section, values in all_sections(new):
        table, old_table = table_at(now, section), table_at(before, section)
        hints = key_types(type(values))
        default_name = _default_name(new, section)
        counts = section.startswith(also)
        if not counts and not _of_trajectory(new, section):
            continue
        if "." in section and old_table.get("name", default_name) != values.name:
            old_table = {"name": old_table.get("name", default_name)}  # its other keys are of another class
        for field in keys(values):
            if not (counts or field.metadata.get("trajectory", True)) or not _has_effect(new, section, field):
                continue
            default = default_name if default_name and field.name == "name" else toml_value(default_of(field))
            value, old_value = table.get(field.name), old_table.get(field.name, default)
            old_value = _with_later_keys(old_value, hints[field.name])
            if _located(old_value, hints[field.name], field) != _located(value, hints[field.name], field):
                lines.append(f"{section}.{field.name}: {value_text(old_value)} -> {value_text(value)}")
    return lines


def effective(config: Any) -> dict[str, dict[str, Any]]:
    """Effective keys: section -> key -> value for every key that has an effect, in the form of TOML."""
    tables: dict[str, dict[str, Any]] = {}
    for section, values in all_sections(config):
        fields = [field for field in keys(values) if (section, field.name) != ("job", "config_file")]
        table = {
            field.name: toml_value(getattr(values, field.name)) for field in fields if _has_effect(config, section, field)
        }
        table = {key: value for key, value in table.items() if value is not None}
        outer, _, name = section.rpartition(".")
        if table or not outer:
            (table_at(tables, outer) if outer else tables)[name] = table
    return tables


def unmet_condition(
    config: Any, section: str, field: dataclasses.Field, rather: Container[str] = ()
) -> tuple[str, Any, tuple | str] | None:
    """Why a key has no effect, if so: dotted key that it depends on, its value, and the values that would do.

    Args:
        rather: keys that are named before others, where one of several would do.
    """
    outer, _, inner = section.rpartition(".")
    if outer and (of_outer := unmet_condition(config, outer, section_at(config, outer).__dataclass_fields__[inner], rather)):
        return of_outer
    for condition, accepted in field.metadata.get("applies", {}).items():
        unmet = [_unmet(config, section, key, accepted) for key in condition.split(" or ")]
        if all(unmet):
            return next((found for found in unmet if found and found[0] in rather), unmet[0])
    return None


def _unmet(config: Any, section: str, condition: str, accepted: tuple | str) -> tuple[str, Any, tuple | str] | None:
    of_section, _, key = condition.rpartition(".") if "." in condition else (section, "", condition)
    values = section_at(config, of_section)
    value = getattr(values, key)
    if not condition_met(value, accepted):
        if isinstance(accepted, tuple):  # of several keys
            accepted = tuple(each for each in accepted if isinstance(each, bool) == isinstance(value, bool)) or accepted
        return f"{of_section}.{key}", value, accepted
    return unmet_condition(config, of_section, values.__dataclass_fields__[key])


def _has_effect(config: Any, section: str, field: dataclasses.Field) -> bool:
    return unmet_condition(config, section, field) is None


def _of_trajectory(config: Any, section: str) -> bool:
    """Check whether the keys of a section inside another one may change the training; every other section's may."""
    outer, _, inner = section.rpartition(".")
    return not outer or section_at(config, outer).__dataclass_fields__[inner].metadata["trajectory"]


def _default_name(config: Any, section: str) -> str:
    """Default `name` of a section; "" for one whose keys depend on no name."""
    outer, _, last = section.rpartition(".")
    options = choices(section_at(config, outer) if outer else config).get(last)
    return options.default if options else ""


def _with_later_keys(old_value: Any, annotation: Any) -> Any:
    """Add to the tables of an old list the defaults of keys that were added later."""
    element: Any = (*typing.get_args(annotation), None)[0]
    if not (isinstance(old_value, list) and dataclasses.is_dataclass(element)):
        return old_value
    known = {field.name for field in dataclasses.fields(element)}

    def completed(entry: dict) -> dict:
        return entry | toml_value(cast(Any, element)(**{key: value for key, value in entry.items() if key in known}))

    return [completed(entry) if isinstance(entry, dict) else entry for entry in old_value]


def _located(value: Any, annotation: Any, field: dataclasses.Field) -> Any:
    """Value with its paths, also those of a list of tables, as the places that they lead to here; URLs stay as they are."""
    if field.metadata.get("path") and isinstance(value, str):
        return os.path.realpath(expanded(value)) if value and "://" not in value else value
    element: Any = (*typing.get_args(annotation), None)[0]
    if not (isinstance(value, list) and dataclasses.is_dataclass(element)):
        return value
    inner = element.__dataclass_fields__
    return [
        {key: _located(each, None, inner[key]) if key in inner else each for key, each in entry.items()}
        if isinstance(entry, dict) else entry for entry in value
    ]  # fmt: skip


def value_text(value: Any) -> str:
    """Format a value as on a command line."""
    if value is None:
        return "none"
    return value if isinstance(value, str) else json.dumps(value, default=str)
