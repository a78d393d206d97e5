"""Errors of several rooms, and exceptions in one line. Imports the standard library only."""

import re
import unicodedata
from collections.abc import Iterable


class CheckpointError(Exception):
    """Checkpoint that cannot be written or read; the message is one line."""


class StoreError(CheckpointError, OSError):
    """Remote store that does not answer or refuses; not an error of the checkpoints in it."""


class LatentStoreError(Exception):
    """Store, or a source of one, that cannot be used; the message is one line: the cause and the remedy."""


class EvaluationError(Exception):
    """Unusable images, features or reference; the message is one line: the cause and the remedy."""


class DamagedFile(Exception):
    """Damaged file; the message says in a few words what is wrong with it."""


class TrainingError(Exception):
    """Training cannot continue; the message is one line: the cause and the remedy."""


class _Problems(Exception):
    def __init__(self, problems: list[str]) -> None:
        super().__init__(problems)  # an exception travels between ranks by its arguments
        self.problems = problems

    def __str__(self) -> str:
        return "\n".join(self.problems)


class ConfigError(_Problems):
    """Configuration that cannot run; a line for each problem: place of the value, its key, the cause, the remedy."""


class RunFolderError(_Problems):
    """Run folder that must not be written to; one line per problem."""


def first_line(error: BaseException) -> str:
    """First line of an exception's text; without gloo's source line and advice."""
    lines = str(error).strip().splitlines()
    if not lines:
        return type(error).__name__
    return re.sub(r"^\[[^]]*\.cc:\d+\] ", "", lines[0]).partition(". This is typically")[0]


def reason(error: Exception) -> str:
    """Reason of a failed write or read, in one line without its path."""
    if problems := getattr(error, "errors", None):  # of pydantic: the first line is their number
        return unwrapped("; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in problems()))
    return unwrapped(getattr(error, "strerror", None) or first_line(error))


def one_line(error: Exception) -> str:
    """Kind and text of an exception of a foreign library, in one line."""
    return f"{type(error).__name__}: {unwrapped(error)}"


def shortened(text: str, most: int = 1000) -> str:
    """Text of at most so many characters, cut between words where it is longer: a number that is cut would be another."""
    if len(text) <= most:
        return text
    end = text.rfind(" ", most // 2, most - 4)
    return f"{text[: end if end > 0 else most - 4]} ..."


def look_alike(name: str, known: Iterable[str]) -> str:
    """Clause on a known name that looks the same but is another one, composed (NFC) or decomposed (NFD); "" without one."""
    form = unicodedata.normalize("NFC", name)
    alike = next((each for each in known if each != name and unicodedata.normalize("NFC", each) == form), None)
    return "" if alike is None else f"; {alike!r} looks the same, in another Unicode form"


def unwrapped(text: object) -> str:
    """Unwrap a text, or that of an exception, to one line: every run of white space is a blank."""
    return " ".join(str(text).split())
