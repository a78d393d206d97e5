"""Schema of a section's dataclass, and one plain line for a refused value.

A section is a dataclass whose fields were made by `torchtitan.settings.setting`. Pydantic does the checking;
messages are worded here, in terms of the TOML file and the command line.
"""

import copy
import dataclasses
import difflib
import functools
import json
import os
import re
import types
import typing
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal, NamedTuple

import pydantic
import pydantic_core

from torchtitan.settings import condition_met
from torchtitan.settings.sections import keys as section_keys

MOST_ENTRIES = 10_000  # of a list
MOST_SHOWN = 20  # problems of one configuration that are printed, and among which words that are alike are looked for
_SMALLEST, _LARGEST = 1.1754943508222875e-38, 3.4028234663852886e38  # normal numbers of float32


class Problem(NamedTuple):
    """Problem: one reason to refuse a configuration.

    Attributes:
        key: the dotted key at fault, as `ema.tracks`.
        text: the cause, and in parentheses the remedy.
        within: the place inside a list or table value, as `[0].decay`.
    """

    key: str
    text: str
    within: str = ""


def validate_section(
    section: str, defaults: Any, values: dict[str, Any], suggest: typing.Callable[[str], str]
) -> tuple[Any, list[Problem]]:
    """Check the given values of a section and lay them over its defaults.

    Args:
        section: name of the section, as `training`.
        defaults: an instance of the section's dataclass.
        values: given ones, key -> value as TOML or JSON has it.
        suggest: unknown dotted key -> advice, printed in parentheses with the first MOST_SHOWN problems.

    Returns:
        a new instance, with the defaults instead of refused values, and the problems.
    """
    declared: Any = type(defaults)
    problems, refused = [], set()
    try:
        given = schema_of(declared).model_validate(values)
    except pydantic.ValidationError as failure:
        for number, error in enumerate(failure.errors(include_url=False, include_context=False)):
            key, *rest = error["loc"]
            refused.add(key)
            if number >= MOST_SHOWN:
                text = "is refused too"
            else:
                advice = suggest(f"{section}.{key}") if error["type"] == "extra_forbidden" else ""
                text = _wording(error, declared, advice)
            problems.append(Problem(f"{section}.{shown_name(str(key))}", text, _within(rest)))
        good = {key: value for key, value in values.items() if key not in refused}
        given = schema_of(declared).model_validate(good)
    changes = {key: _to_dataclass(getattr(given, key), declared, key) for key in given.model_fields_set}
    for key in changes:
        for place, text in _ignored_in_tables(getattr(given, key), changes[key]):
            problems.append(Problem(f"{section}.{key}", text, place))
    return dataclasses.replace(copy.deepcopy(defaults), **changes), problems


@functools.cache
def schema_of(section: type) -> type[pydantic.BaseModel]:
    """Schema of a section as a pydantic model: keys, types, bounds, descriptions and defaults; without inner sections.
    """
    hints = typing.get_type_hints(section)
    keys: dict[str, Any] = {}
    for field in section_keys(section):
        details = pydantic.Field(
            default=toml_value(default_of(field)),
            description=field.metadata.get("description"),
            **field.metadata.get("bounds", {}),
        )
        strict_type = _strict_type(hints[field.name])
        if field.metadata.get("path"):
            strict_type = Annotated[strict_type, pydantic.AfterValidator(expanded)]
        keys[field.name] = (strict_type, details)
    strict = pydantic.ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())
    return pydantic.create_model(section.__name__, __config__=strict, __module__=section.__module__, **keys)


def default_of(field: dataclasses.Field) -> Any:
    """Default value of a key."""
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def expanded(path: Any) -> Any:
    """Expand `~` at the beginning of a path; a URL, and what is no text, stay unchanged."""
    return os.path.expanduser(path) if isinstance(path, str) else path


def unmet_in_table(table: Any, field: dataclasses.Field) -> tuple[str, Any, tuple | str] | None:
    """Find why a key of a table has no effect.

    Returns:
        the key of the same table that it depends on, that key's value, and the values under which it would have an
        effect; None if it has one.
    """
    for key, accepted in field.metadata.get("applies", {}).items():
        value = getattr(table, key)
        if not condition_met(value, accepted):
            return key, value, accepted
    return None


def no_effect(key: str, value: Any, accepted: tuple | str, because: str = "") -> str:
    """Report that a key is ignored because another one has a value that is not among the accepted ones."""
    named = {">0": f"{key} above 0", "set": key}
    remedy = named[accepted] if isinstance(accepted, str) else f"{key} = {' or '.join(map(_unquoted, accepted))}"
    reason = f": {because}" if because else ""
    return f"has no effect when {key} = {_unquoted(value)}{reason}; remove it or set {remedy}"


def toml_value(value: Any) -> Any:
    """Convert a value to TOML's types: tables for dataclasses, without the keys that are None or have no effect."""
    if dataclasses.is_dataclass(value):
        fields = [field for field in dataclasses.fields(value) if unmet_in_table(value, field) is None]
        pairs = {field.name: toml_value(getattr(value, field.name)) for field in fields}
        return {key: entry for key, entry in pairs.items() if entry is not None}
    if isinstance(value, list):
        return [toml_value(entry) for entry in value]
    return value


def parse_text(text: str, annotation: Any) -> Any:
    """Parse a value of the command line as the type of its key.

    Returns:
        the value; text that cannot be read as that type is returned itself, and refused by the schema.
    """
    inner, optional = without_none(annotation)
    if optional and text in ("none", "null"):
        return None
    if inner is bool:
        return {"true": True, "false": False}.get(text, text)
    if inner in (int, float):
        return _number(text, inner)
    if inner is str or typing.get_origin(inner) is Literal:
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def without_none(annotation: Any) -> tuple[Any, bool]:
    """Split a type into (X, True) for `X | None`, and (X, False) for any other X."""
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        inner = [member for member in typing.get_args(annotation) if member is not types.NoneType]
        if len(inner) != 1:
            raise TypeError(f"a configuration key has one type, or one type and None; not {annotation}")
        return inner[0], True
    return annotation, False


def type_name(annotation: Any, many: bool = False) -> str:
    """Name the type of a value in words: "an integer", "a list of tables", "one of uniform, logit_normal"."""
    inner, optional = without_none(annotation)
    if typing.get_origin(inner) is Literal:
        name = "one of " + ", ".join(str(choice) for choice in typing.get_args(inner))
    elif typing.get_origin(inner) is list:
        name = ("lists of " if many else "a list of ") + type_name(typing.get_args(inner)[0], many=True)
    elif dataclasses.is_dataclass(inner):
        name = "tables" if many else "a table"
    else:
        one, several = {
            bool: ("true or false", "true or false"),
            int: ("an integer", "integers"),
            float: ("a number", "numbers"),
            str: ("a string", "strings"),
        }[inner]
        name = several if many else one
    return f"{name}, or none" if optional else name


def range_name(bounds: dict[str, float]) -> str:
    """Name bounds in words: "at least 0 and below 1"; empty without bounds."""
    words = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    return " and ".join(f"{words[name]} {bound:.10g}" for name, bound in bounds.items())


def quoted(value: Any, limit: int = 60) -> str:
    """Format a value on one line for a message: strings quoted, long ones cut."""
    if isinstance(value, bool):
        return str(value).lower()
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits; a list thousands deep
        return "a value too long to print"
    return text if len(text) <= limit else text[: limit - 3] + "..."


def shown_name(name: str) -> str:
    """Format a key for a message; quoted where it is not a plain TOML key."""
    return name if re.fullmatch(r"[A-Za-z0-9_.-]{1,60}", name) else quoted(name)


def nearest(word: str, known: Iterable[str]) -> str:
    """Nearest known word to the given one, or "" if none is close."""
    return next(iter(difflib.get_close_matches(word[:100], list(known), n=1, cutoff=0.6)), "")


def _strict_type(annotation: Any) -> Any:
    strict: Any
    inner, optional = without_none(annotation)
    if typing.get_origin(inner) is list:
        entries = types.GenericAlias(list, (_strict_type(typing.get_args(inner)[0]),))
        strict = Annotated[entries, pydantic.AfterValidator(_of_bounded_length)]
    elif dataclasses.is_dataclass(inner):
        strict = schema_of(typing.cast(Any, inner))
    elif inner is int:
        strict = Annotated[int, pydantic.BeforeValidator(_integral_in_64_bits)]
    elif inner is float:
        strict = Annotated[float, pydantic.BeforeValidator(_in_64_bits), pydantic.AfterValidator(_in_float32)]
    elif inner is str:
        strict = Annotated[str, pydantic.AfterValidator(_printable)]
    else:
        strict = inner
    return strict | None if optional else strict


def _integral_in_64_bits(value: Any) -> Any:
    """Accept 1e6 as an integer like 1000000, in TOML and on the command line."""
    return _in_64_bits(int(value) if isinstance(value, float) and value.is_integer() else value)


def _in_64_bits(value: Any) -> Any:
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise pydantic_core.PydanticCustomError("worded", "must fit in 64 bits")
    return value


def _in_float32(value: float) -> float:
    """Require a normal number of float32: others would be 0 or infinite in most tensors of this program."""
    if value and not _SMALLEST <= abs(value) <= _LARGEST:
        raise pydantic_core.PydanticCustomError("worded", f"must be 0 or from {_SMALLEST:.2g} to {_LARGEST:.2g} in size")
    return value


def _of_bounded_length(value: list) -> list:
    if len(value) > MOST_ENTRIES:
        raise pydantic_core.PydanticCustomError("worded", f"must have at most {MOST_ENTRIES} entries, has {len(value)}")
    return value


def _printable(value: str) -> str:
    if not value.isprintable():
        raise pydantic_core.PydanticCustomError("worded", "must have printable characters only")
    return value


def _number(text: str, kind: type) -> Any:
    """Parse a number, or return the text itself; nan and inf are numbers, which the schema refuses."""
    if re.fullmatch(r"[+-]?[0-9]+(_[0-9]+)*", text):
        return kind(int(text)) if len(text) <= 100 else text
    try:
        return float(text)
    except ValueError:
        return text


def _to_dataclass(value: Any, declared: type, key: str) -> Any:
    """Convert the pydantic models inside a validated value back to the dataclasses they came from."""
    return _rebuild(value, typing.get_type_hints(declared)[key])


def _rebuild(value: Any, annotation: Any) -> Any:
    inner, _ = without_none(annotation)
    if isinstance(value, list):
        return [_rebuild(entry, typing.get_args(inner)[0]) for entry in value]
    if isinstance(value, pydantic.BaseModel):
        return inner(**{key: _to_dataclass(getattr(value, key), inner, key) for key in value.model_fields_set})
    return value


def _ignored_in_tables(given: Any, value: Any, place: str = "") -> Iterator[tuple[str, str]]:
    """Ignored keys of tables: (place, text) of every given key that has no effect with the others."""
    if isinstance(given, list):
        for index, (entry, table) in enumerate(zip(given, value, strict=True)):
            yield from _ignored_in_tables(entry, table, f"{place}[{index}]")
    elif isinstance(given, pydantic.BaseModel):
        for field in dataclasses.fields(value):
            if field.name in given.model_fields_set and (unmet := unmet_in_table(value, field)):
                yield f"{place}.{field.name}", no_effect(*unmet)


def _unquoted(value: Any) -> str:
    return value if isinstance(value, str) else quoted(value)


def _wording(error: Any, declared: type, advice: str) -> str:
    """Word pydantic's findings for users."""
    kind, value = error["type"], error["input"]
    if kind == "worded":
        return f"{error['msg']}, is {quoted(value)}"
    if kind == "extra_forbidden":
        if len(error["loc"]) == 1:
            return f"unknown key ({advice})"
        table, _ = _declaration(declared, error["loc"][:-1])
        known = [field.name for field in dataclasses.fields(table)]
        guess = nearest(error["loc"][-1], known)
        return f"unknown key ({f'did you mean {guess}?' if guess else 'known: ' + ', '.join(known)})"
    annotation, bounds = _declaration(declared, error["loc"])
    if kind in ("greater_than", "greater_than_equal", "less_than", "less_than_equal"):
        return f"must be {range_name(bounds)}, is {quoted(value)}"
    if kind == "finite_number":
        return f"must be a finite number, is {quoted(value)}"
    inner, _ = without_none(annotation)
    guess = nearest(value, typing.get_args(inner)) if kind == "literal_error" and isinstance(value, str) else ""
    return f"must be {type_name(annotation)}, is {quoted(value)}" + (f" (did you mean {guess}?)" if guess else "")


def _declaration(declared: Any, place: Iterable[str | int]) -> tuple[Any, dict[str, float]]:
    """Declaration at a place of a section, as ("tracks", 0, "decay"): type and bounds."""
    annotation: Any = declared
    bounds: dict[str, float] = {}
    for step in place:
        inner, _ = without_none(annotation)
        if isinstance(step, int):
            annotation, bounds = typing.get_args(inner)[0], {}
        else:
            annotation = typing.get_type_hints(inner)[step]
            bounds = inner.__dataclass_fields__[step].metadata.get("bounds", {})
    return annotation, bounds


def _within(place: Iterable[str | int]) -> str:
    return "".join(f"[{step}]" if isinstance(step, int) else f".{shown_name(step)}" for step in place)
