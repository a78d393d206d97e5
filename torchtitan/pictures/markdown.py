"""Markdown with escaped text: names and reasons make no tables, emphasis, HTML or lines of their own."""

import re
from collections.abc import Iterable, Sequence

from torchtitan.errors import unwrapped

_ACTIVE = re.compile(r"[\\`*~|]|(?<!\w)_|_(?!\w)")  # `_` within a word is text


class Markdown(str):
    """Markdown text; any other string is escaped when it is inserted."""


def inline(text: str) -> Markdown:
    """Escape a text for a heading, a cell, or the middle of a line of Markdown."""
    if isinstance(text, Markdown):
        return text
    return Markdown(_ACTIVE.sub(r"\\\g<0>", unwrapped(text)).replace("<", "&lt;"))


def bullet(text: str) -> Markdown:
    """Escape a text for an item of a list."""
    return Markdown(f"- {inline(text)}")


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> Markdown:
    """Format a table in Markdown, with an empty line behind it."""
    lines = ["| " + " | ".join(map(inline, header)) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(map(inline, row)) + " |" for row in rows]
    return Markdown("\n".join(lines) + "\n\n")
