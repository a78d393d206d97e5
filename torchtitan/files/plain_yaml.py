"""Plain YAML: mappings, lists and scalars, as configuration files have them.

The rest of the language is refused with its line: anchors, aliases and tags, by which a small file becomes a large one or an
object, several documents, and texts of several lines.
"""

import re
from typing import Any, NamedTuple

MAX_CHARACTERS = 1 << 16
MAX_DEPTH = 8
MAX_SCALAR = 256  # characters

_KEY = re.compile(r"([A-Za-z_][\w.-]*)[ ]*:(?:[ ]+(.*))?")
_INTEGER = re.compile(r"[-+]?(?:0|[1-9][0-9_]*)")
_FLOAT = re.compile(r"[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?")
_WORDS: dict[str, Any] = {"": None, "~": None, "null": None, ".nan": float("nan"), ".inf": float("inf"), "-.inf": -float("inf")}
_WORDS |= {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_REFUSED = {
    "&": "an anchor", "*": "an alias", "!": "a tag", "|": "a text of several lines", ">": "a text of several lines",
    "?": "a complex key", "%": "a directive", "@": "a reserved character", "`": "a reserved character",
}  # fmt: skip
_ESCAPES = {"\\": "\\", '"': '"', "n": "\n", "t": "\t"}


class PlainYamlError(Exception):
    """Text that is no plain YAML; the message is one line, with the line's number."""


class _Line(NamedTuple):
    number: int
    indent: int
    text: str


def read_plain_yaml(text: str) -> dict[str, Any]:
    """Read the mapping that a text of plain YAML is.

    Args:
        text: lines of `key: value`, deeper mappings and lists by indentation or in brackets.

    Returns:
        keys in their order; values are mappings, lists, strings, numbers, booleans and None. `1e-3` is a number, as in
        YAML 1.2.

    Raises:
        PlainYamlError: something else of YAML, no YAML, a key given twice, or beyond the bounds above.
    """
    if len(text) > MAX_CHARACTERS:
        raise PlainYamlError(f"{len(text):,} characters, more than {MAX_CHARACTERS:,} (is it a configuration?)")
    lines = _lines(text)
    if not lines:
        raise PlainYamlError("holds no `key: value`")
    found, rest = _mapping(lines, 0, lines[0].indent, 1)
    if rest < len(lines):
        raise _error(lines[rest], "is indented less than the first line")
    return found


def _lines(text: str) -> list[_Line]:
    """Lines with content, without comments."""
    lines = []
    for number, raw in enumerate(text.split("\n"), 1):
        content = raw.rstrip(" \r")
        if number == 1 and content == "---":
            continue
        body = content.lstrip(" ")
        line = _Line(number, len(content) - len(body), body)
        if not body or body.startswith("#"):
            continue
        if not body.isprintable():
            raise _error(line, "holds a tab or a control character (indent by blanks)")
        if body in ("---", "...") or body.startswith("--- "):
            raise _error(line, "begins another document (give one)")
        lines.append(line)
    return lines


def _mapping(lines: list[_Line], at: int, indent: int, depth: int) -> tuple[dict[str, Any], int]:
    """Mapping of the lines from `at` that are indented so, and the place of the line after it."""
    found: dict[str, Any] = {}
    while at < len(lines) and lines[at].indent >= indent:
        line = lines[at]
        if line.indent > indent:
            raise _error(line, "is indented deeper than the line before allows")
        match = _KEY.fullmatch(line.text)
        if match is None:
            raise _error(line, _refusal(line.text) or f"{_shown(line.text)} is no `key: value`")
        key, value = match[1], _Scanner(line, match[2] or "").without_comment()
        if key in found:
            raise _error(line, f"{key}: is given twice")
        at += 1
        if value:
            found[key] = _Scanner(line, value).whole()
        else:
            found[key], at = _block(lines, at, indent, depth + 1)
    return found, at


def _block(lines: list[_Line], at: int, indent: int, depth: int) -> tuple[Any, int]:
    """Value that follows a key on lines of its own: a mapping, a list, or None, and the place of the line after it."""
    if at == len(lines):
        return None, at
    line = lines[at]
    listed = line.text == "-" or line.text.startswith("- ")
    if line.indent <= indent and not (listed and line.indent == indent):
        return None, at
    if depth > MAX_DEPTH:
        raise _error(line, f"is more than {MAX_DEPTH} mappings deep")
    if not listed:
        return _mapping(lines, at, line.indent, depth)
    entries = []
    while at < len(lines) and lines[at].indent == line.indent and lines[at].text.startswith("-"):
        scanner = _Scanner(lines[at], lines[at].text[1:].strip(" "))
        entries.append(_Scanner(lines[at], scanner.without_comment()).whole())
        at += 1
    return entries, at


class _Scanner:
    """Scanner of the value on one line."""

    def __init__(self, line: _Line, text: str) -> None:
        self._line, self._text, self._at = line, text, 0

    def without_comment(self) -> str:
        """Text up to a comment: a hash that follows a blank, outside quotes."""
        quote = before = ""  # the quote that is open, and the last character that is no blank
        for place, character in enumerate(self._text):
            if quote:
                quote = "" if character == quote else quote
            elif character in "'\"" and before in ("", "[", "{", ",", ":"):
                quote = character
            elif character == "#" and (place == 0 or self._text[place - 1] == " "):
                return self._text[:place].rstrip(" ")
            before = before if character == " " else character
        return self._text.rstrip(" ")

    def whole(self) -> Any:
        """Value that takes the whole text."""
        if self._text[:1] not in ("[", "{", "'", '"'):
            if refused := _refusal(self._text):
                raise _error(self._line, refused)
            if ": " in self._text or self._text.endswith(":"):
                raise _error(self._line, f"{_shown(self._text)} has a second colon (quote it)")
            return self._scalar(self._text)
        value = self._value(1)
        if self._rest():
            raise _error(self._line, f"{_shown(self._rest())} follows a value that has ended")
        return value

    def _rest(self) -> str:
        return self._text[self._at :].lstrip(" ")

    def _next(self) -> str:
        """Character after blanks, "" at the end; scanning stands before it."""
        while self._text[self._at : self._at + 1] == " ":
            self._at += 1
        return self._text[self._at : self._at + 1]

    def _value(self, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise _error(self._line, f"has more than {MAX_DEPTH} brackets in one another")
        first = self._next()
        if first == "[":
            return self._entries("]", depth)
        if first == "{":
            return dict(self._entries("}", depth))
        if first in ("'", '"') and first:
            return self._quoted(first)
        start = self._at
        while self._text[self._at : self._at + 1] not in ("", ",", "[", "]", "{", "}"):
            if self._text[self._at : self._at + 2] in (": ", ":"):
                break
            self._at += 1
        text = self._text[start : self._at].rstrip(" ")
        if not text:
            raise _error(self._line, f"{_shown(self._text)} lacks a value")
        if refused := _refusal(text):
            raise _error(self._line, refused)
        return self._scalar(text)

    def _entries(self, end: str, depth: int) -> list[Any]:
        """Entries of a list, or pairs of a mapping, in brackets."""
        self._at += 1
        entries: list[Any] = []
        seen = set()
        while self._next() != end:
            if entries and not self._took(","):
                raise _error(self._line, f"{_shown(self._text)} lacks {end} (lists in brackets are on one line)")
            if self._next() == end:
                break
            entry = self._value(depth + 1)
            if end == "}":
                if not isinstance(entry, str) or not self._took(":"):
                    raise _error(self._line, f"{_shown(self._text)} is no mapping of `key: value`")
                if entry in seen:
                    raise _error(self._line, f"{entry}: is given twice")
                seen.add(entry)
                entry = (entry, self._value(depth + 1))
            entries.append(entry)
        self._at += 1
        return entries

    def _took(self, wanted: str) -> bool:
        if self._next() != wanted:
            return False
        self._at += 1
        return True

    def _quoted(self, quote: str) -> str:
        self._at += 1
        found = ""
        while (character := self._text[self._at : self._at + 1]) not in ("", quote):
            self._at += 1
            if quote == '"' and character == "\\":
                escape = self._text[self._at : self._at + 1]
                if escape not in _ESCAPES or not escape:
                    raise _error(self._line, f"{_shown(self._text)} has an escape other than \\\\, \\\", \\n and \\t")
                character = _ESCAPES[escape]
                self._at += 1
            found += character
            if quote == "'" and self._text[self._at : self._at + 2] == "''":
                found, self._at = found + "'", self._at + 2
        if not character:
            raise _error(self._line, f"{_shown(self._text)} lacks its second {quote}")
        self._at += 1
        return self._bounded(found)

    def _scalar(self, text: str) -> Any:
        self._bounded(text)
        if text in (text.lower(), text.capitalize(), text.upper()) and text.lower() in _WORDS:
            return _WORDS[text.lower()]
        if _INTEGER.fullmatch(text):
            return int(text.replace("_", ""))
        if re.fullmatch(r"[-+]?0[0-9_]+", text):
            raise _error(self._line, f"{text} has a leading zero, which readers of YAML take for octal (remove it)")
        return float(text.replace("_", "")) if _FLOAT.fullmatch(text) else text

    def _bounded(self, text: str) -> str:
        if len(text) > MAX_SCALAR:
            raise _error(self._line, f"a value of {len(text):,} characters is longer than {MAX_SCALAR}")
        return text


def _refusal(text: str) -> str:
    """Reason to refuse what begins so; "" for plain YAML."""
    if text.startswith("<<"):
        return "has a merge key, which is no plain YAML (write the keys out)"
    if text == "-" or text.startswith("- "):
        return "is an entry of a list without a key"
    kind = _REFUSED.get(text[:1])
    return f"{_shown(text)} has {kind}, which is no plain YAML (write the value out, or quote it)" if kind else ""


def _error(line: _Line, text: str) -> PlainYamlError:
    return PlainYamlError(f"line {line.number}: {text}")


def _shown(text: str) -> str:
    return repr(text if len(text) <= 40 else f"{text[:37]}...")
