"""Terminal output: control characters of names and messages are shown escaped, so that they move no cursor.

File names, labels, captions and other programs' output may hold escape sequences. They are shown escaped (`\\x1b[2J`)
at the one place where text leaves for a terminal or a log: the streams, through which prints, logging, warnings,
tracebacks and progress bars all go.
"""

import re
import sys
from collections.abc import Iterable
from typing import Any, TextIO

# C0 and C1 controls and DEL but for tab and newline; line separators, marks and overrides of the writing direction; and
# halves of surrogate pairs, as which Python holds the bytes of a name that is no UTF-8.
_HIDDEN = (
    *(code for code in range(0x20) if chr(code) not in "\t\n"), *range(0x7F, 0xA0), 0x061C, 0x200E, 0x200F,
    *range(0x2028, 0x202F), *range(0x2066, 0x206A), 0xFEFF, *range(0xD800, 0xE000),
)  # fmt: skip
_ESCAPED = {code: f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" for code in _HIDDEN}
MOST_OF_A_NAME = 200  # characters of a line of a name that are shown; those of folders have 255 at most
# A progress bar moves to another line in a write of its own, and to the start of its own line before each of its texts.
_BAR_MOVES = re.compile(r"(\n|\x1b\[A)*")


def printable(text: str) -> str:
    """Escape characters that move the cursor, change colours or reverse reading order; newlines and tabs stay."""
    return text.translate(_ESCAPED)


def shortened(text: str, most: int = MOST_OF_A_NAME) -> str:
    """Shorten lines to a number of characters; of longer ones the middle is left out."""
    if len(text) <= most:
        return text
    half = (most - 3) // 2
    lines = text.split("\n")
    return "\n".join(line if len(line) <= most else f"{line[:half]}...{line[-half:]}" for line in lines)


def escape_output() -> None:
    """Escape control characters in everything this process prints from now on; for a program's main, before it prints.
    """
    for name in ("stdout", "stderr"):
        if (stream := getattr(sys, name)) is not None:  # None: it was closed when Python started
            setattr(sys, name, PrintableStream(stream))


class OutputError(OSError):
    """Output that cannot be written: its reader has gone, or the disk behind it is full."""


class PrintableStream:
    """Text stream with `printable` writes, which fail as OutputError; the rest is the stream's own."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        if not _BAR_MOVES.fullmatch(text):
            start = "\r" if text.startswith("\r") else ""
            text = start + printable(text.removeprefix(start))
        try:
            return self._stream.write(text)
        except OSError as error:
            raise OutputError(error.errno, error.strerror) from error

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            raise OutputError(error.errno, error.strerror) from error

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
