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
from collections.abc import Callable, Iterable
from typing import Annotated, Any, Literal, NamedTuple

import pydantic
import pydantic_core

from torchtitan.settings import condition_met, key_types
from torchtitan.settings.sections import keys as section_keys
from torchtitan.settings.synonyms import VALUES


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
    section: str, defaults: Any, values: dict[str, Any], suggest: Callable[[str], str] = lambda key: ""
) -> tuple[Any, list[Problem]]:
    """Lay a section's values over its defaults, also where they are refused: a new instance, and the problems."""
    declared: Any = type(defaults)
    problems, refused = [], set()
    try:
        given = schema_of(declared).model_validate(values)
    except pydantic.ValidationError as failure:
        for error in failure.errors(include_url=False):
            key, *rest = error["loc"]
            refused.add(key)
            text, place = _wording(error, declared, suggest), rest + [*filter(None, [error.get("ctx", {}).get("key")])]
            problems.append(Problem(f"{section}.{shown_name(str(key))}", text, _within(place)))
        given = schema_of(declared).model_validate({key: value for key, value in values.items() if key not in refused})
    changes = {key: getattr(given, key) for key in given.model_fields_set}
    return dataclasses.replace(copy.deepcopy(defaults), **changes), problems


def schema_of(section: type) -> type[pydantic.BaseModel]:
    """Schema of a section as a pydantic model: keys, types, bounds, descriptions and defaults; without inner sections."""
    return _schema(section, tuple(key_types(section).items()))


@functools.cache
def _schema(section: type, types_of_keys: tuple[tuple[str, Any], ...]) -> type[pydantic.BaseModel]:
    hints = dict(types_of_keys)
    keys: dict[str, Any] = {}
    for field in section_keys(section):
        bounds, words = field.metadata.get("bounds", {}), words_beside(hints[field.name])
        details = pydantic.Field(
            default=toml_value(default_of(field)),
            description=field.metadata.get("description"),
            **({} if words else bounds),
        )
        strict_type = _number_or(words, bounds) if words else _strict_type(hints[field.name])
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
        the table's key that it depends on, its value, and the values that it would need; None if it has an effect.
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
    now = f"without {key}" if value == "" else f"when {key} = {_unquoted(value)}"
    return f"has no effect {now}{reason}; remove it or set {remedy}"


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
    """Parse a command line's value as the type of its key, or return the text itself, for the schema to refuse."""
    inner, optional = without_none(annotation)
    if optional and text in ("none", "null"):
        return None
    if words := words_beside(inner):
        return text if text in words else _number(text, float)
    if inner is bool:
        return {"true": True, "false": False}.get(text, text)
    if inner in (int, float):
        return _number(text, inner)
    if inner is str or typing.get_origin(inner) is Literal:
        return text
    if typing.get_origin(inner) is list and not text.startswith("["):  # of names or numbers, which may stand between commas
        element = typing.get_args(inner)[0]
        if element is str and " " in text:  # a prompt, which may have commas
            return [text]
        plain = element in (str, int, float) or typing.get_origin(element) is Literal
        return [parse_text(part, element) for part in text.split(",")] if plain else text
    try:
        return json.loads(text)
    except ValueError:
        return text


def without_none(annotation: Any) -> tuple[Any, bool]:
    """Split a type into (X, True) for `X | None`, and (X, False) for any other X."""
    if types.NoneType in typing.get_args(annotation):
        return next(member for member in typing.get_args(annotation) if member is not types.NoneType), True
    return annotation, False


def words_beside(annotation: Any) -> tuple[str, ...]:
    """Words that a key takes instead of a number, of a type `float | Literal[...]`; of any other type none."""
    if typing.get_origin(annotation) not in (types.UnionType, typing.Union):
        return ()
    return tuple(word for member in typing.get_args(annotation) for word in typing.get_args(member))


def type_name(annotation: Any, many: bool = False) -> str:
    """Name the type of a value in words: "an integer", "a list of tables", "one of uniform, logit_normal"."""
    inner, optional = without_none(annotation)
    if words := words_beside(inner):
        name = f"a number or {' or '.join(words)}"
    elif typing.get_origin(inner) is Literal:
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
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def shown_name(name: str) -> str:
    """Format a key for a message; quoted where it is not a plain TOML key."""
    return name if re.fullmatch(r"[A-Za-z0-9_.-]{1,60}", name) else quoted(name)


def nearest(word: str, known: Iterable[str]) -> str:
    """Known word that means the same as the given one, or else the nearest; "" if none is close."""
    known = list(known)
    if (meant := VALUES.get(word.lower())) in known:
        return meant
    return next(iter(difflib.get_close_matches(word[:100], list(known), n=1, cutoff=0.6)), "")


def _strict_type(annotation: Any) -> Any:
    strict: Any
    inner, optional = without_none(annotation)
    if typing.get_origin(inner) is list:
        strict = types.GenericAlias(list, (_strict_type(typing.get_args(inner)[0]),))
    elif dataclasses.is_dataclass(inner):
        strict = Annotated[schema_of(typing.cast(Any, inner)), pydantic.AfterValidator(functools.partial(_as_table, inner))]
    elif inner is int:
        strict = Annotated[int, pydantic.BeforeValidator(_integral)]
    else:
        strict = inner
    return strict | None if optional else strict


def _number_or(words: tuple[str, ...], bounds: dict[str, Any]) -> Any:
    """Strict type of a number within bounds, or one of some words: one type, so that a refused value is one problem."""
    number: Any = Annotated[float, pydantic.Field(**bounds)]
    schema = pydantic.TypeAdapter(number | Literal[words]).json_schema()
    either = pydantic.WrapValidator(lambda value, strict: value if value in words else strict(value))
    return Annotated[number, either, pydantic.WithJsonSchema(schema)]


def _integral(value: Any) -> Any:
    """Accept 1e6 as an integer like 1000000, in TOML and on the command line."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _number(text: str, kind: type) -> Any:
    """Parse a number, or return the text itself; nan and inf are numbers, which the schema refuses."""
    for read in (int, float) if kind is int else (float,):
        try:
            return read(text)
        except ValueError:
            pass
    return text


def _as_table(declared: Any, given: pydantic.BaseModel) -> Any:
    """Convert a validated table to its dataclass. Raises PydanticCustomError: a given key has no effect with the others."""
    table = declared(**{key: getattr(given, key) for key in given.model_fields_set})
    for field in dataclasses.fields(table):
        if field.name in given.model_fields_set and (unmet := unmet_in_table(table, field)):
            raise pydantic_core.PydanticCustomError("no_effect", no_effect(*unmet), {"key": field.name})
    return table


def _unquoted(value: Any) -> str:
    return value if isinstance(value, str) else quoted(value)


def _wording(error: Any, declared: type, suggest: Callable[[str], str]) -> str:
    """Word pydantic's findings for users."""
    kind, value = error["type"], error["input"]
    if kind == "no_effect":
        return error["msg"]
    if kind == "extra_forbidden":
        if len(error["loc"]) == 1:
            return f"unknown key ({suggest(error['loc'][0])})"
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
            annotation = key_types(inner)[step]
            bounds = inner.__dataclass_fields__[step].metadata.get("bounds", {})
    return annotation, bounds


def _within(place: Iterable[str | int]) -> str:
    return "".join(f"[{step}]" if isinstance(step, int) else f".{shown_name(step)}" for step in place)
