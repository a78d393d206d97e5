"""Plain YAML: mappings, lists and scalars, as configuration files have them.

Anchors, aliases and tags, by which a small file becomes a large one or an object, are refused with their line, and so are
keys given twice, several documents, and what is beyond the bounds below.
"""

import re
from typing import Any

import yaml

MAX_CHARACTERS = 1 << 16
MAX_DEPTH = 8
MAX_SCALAR = 256  # characters


class PlainYamlError(Exception):
    """Text that is no plain YAML; the message is one line, with the line's number."""


class _Loader(yaml.SafeLoader):
    """Loader of plain YAML, whose scalars are those of YAML 1.2: `1e-3` is a number, `1:30` and dates are text."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}
    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent):
            raise _error(event, "an alias is no plain YAML (write the value out)")
        if event.anchor is not None:
            raise _error(event, "an anchor is no plain YAML (write the value out)")
        if event.tag is not None:
            raise _error(event, "a tag is no plain YAML (remove it)")
        if isinstance(event, yaml.ScalarEvent) and len(event.value) > MAX_SCALAR:
            raise _error(event, f"a value of {len(event.value):,} characters is longer than {MAX_SCALAR}")
        if self.depth > MAX_DEPTH:
            raise _error(event, f"more than {MAX_DEPTH} mappings and lists lie in one another")
        self.depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag != "tag:yaml.org,2002:str":
                raise _error(key, "a key is no name")
            if key.value in seen:
                raise _error(key, f"{key.value}: is given twice")
            seen.add(key.value)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"(?:~|null|Null|NULL|)\Z"), ["~", "n", "N", ""])
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool",
    re.compile(r"(?:yes|Yes|YES|no|No|NO|true|True|TRUE|false|False|FALSE|on|On|ON|off|Off|OFF)\Z"), list("yYnNtTfFoO"),
)  # fmt: skip
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"[-+]?(?:0|[1-9][0-9_]*)\Z"), list("-+0123456789"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"(?:[-+]?(?:[0-9][0-9_]*\.[0-9_]*|[0-9][0-9_]*(?=[eE])|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))\Z"
    ),
    list("-+0123456789."),
)  # fmt: skip


def read_plain_yaml(text: str) -> dict[str, Any]:
    """Read the mapping that a text of plain YAML is.

    Returns:
        keys in their order; values are mappings, lists, strings, numbers, booleans and None.

    Raises:
        PlainYamlError: something else of YAML, no YAML, a key given twice, or beyond the bounds above.
    """
    if len(text) > MAX_CHARACTERS:
        raise PlainYamlError(f"{len(text):,} characters, more than {MAX_CHARACTERS:,} (is it a configuration?)")
    try:
        found = yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}: " if mark else ""
        raise PlainYamlError(where + " ".join(f"{error.problem or error}".split())) from error
    except (yaml.YAMLError, ValueError) as error:  # a control character; a number that Python does not read
        raise PlainYamlError(" ".join(str(error).split())) from error
    if not isinstance(found, dict):
        raise PlainYamlError("holds no `key: value`")
    return found


def _error(place: yaml.Event | yaml.Node, text: str) -> PlainYamlError:
    return PlainYamlError(f"line {place.start_mark.line + 1}: {text}")
