"""Markdown with escaped text: names and reasons make no tables, links, HTML or lines of their own."""

import re
from collections.abc import Iterable, Sequence

from torchtitan.errors import unwrapped
from torchtitan.terminal import printable, shortened

MOST_OF_A_TEXT = 2000  # characters of a cell or an item; sentences of a report have a few hundred

# What begins emphasis, code, a cell, or the target of a link; `_` within a word and `[` alone are text.
_ACTIVE = re.compile(r"[\\`*~|]|(?<!\w)_|_(?!\w)|(?<=\])[(:\[]")
# What a list item may begin with to be more than text: a heading, a list, a quotation, a rule.
_OF_A_BLOCK = re.compile(r"(\d*)([#>.)=+-])")


class Markdown(str):
    """Markdown text; any other string is escaped when it is inserted."""


def inline(text: str) -> Markdown:
    """Escape a text for a heading, a cell, or the middle of a line of Markdown."""
    if isinstance(text, Markdown):
        return text
    text = printable(shortened(unwrapped(text), MOST_OF_A_TEXT))
    return Markdown(_ACTIVE.sub(r"\\\g<0>", text).replace("&", "&amp;").replace("<", "&lt;"))


def bullet(text: str) -> Markdown:
    """Escape a text for an item of a list."""
    written = inline(text)
    begins_a_block = _OF_A_BLOCK.match(written)
    return Markdown("- " + (_OF_A_BLOCK.sub(r"\1\\\2", written, count=1) if begins_a_block else written))


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> Markdown:
    """Format a table in Markdown, with an empty line behind it."""
    lines = ["| " + " | ".join(map(inline, header)) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(map(inline, row)) + " |" for row in rows]
    return Markdown("\n".join(lines) + "\n\n")
