"""Sources of values: the TOML file and the command line."""

import re
import stat
import tomllib
from collections.abc import Iterable
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from torchtitan.errors import unwrapped
from torchtitan.settings.schema import quoted, shown_name
from torchtitan.settings.synonyms import synonym

SHIPPED = Path(__file__).resolve().parents[1] / "train_configs"
_LARGEST_FILE = 4 << 20  # bytes
_DEEPEST = 50


def read_command_line(argv: list[str]) -> tuple[dict[str, str], list[str]]:
    """Split `--section.key value` and `--section.key=value` into key -> text; the last of equal flags counts.

    Returns:
        the texts by dotted key, and one line per argument that is not such a pair.
    """
    texts, problems = {}, []
    arguments = list(argv)
    while arguments:
        argument = arguments.pop(0)
        if not argument.startswith("--"):
            toml = argument.endswith(".toml")
            advice = f"--job.config_file {shown_name(argument)}" if toml else "every setting is --section.key value"
            problems.append(f"command line: {quoted(argument)}: argument without a key ({advice})")
            continue
        key, equals, text = argument[2:].partition("=")
        key = "job.config_file" if key == "config" else key.replace("-", "_") if "." in key else key
        if equals:
            texts[key] = text
        elif arguments and not arguments[0].startswith("--"):
            texts[key] = arguments.pop(0)
        else:
            name = shown_name(key)
            advice = synonym(key, "--") or f"--{name} VALUE or --{name}=VALUE"
            problems.append(f"command line: --{name}: needs a value ({advice})")
    return texts, problems


def split_keys(words: list[str], section: str = r"[\w-]+") -> tuple[list[str], list[str]]:
    """Split the words of a command's own options from `--section.key VALUE` and `--section.key=VALUE`, of one section or all."""
    own, of_keys, rest = [], [], list(words)
    while rest:
        word = rest.pop(0)
        if not re.match(rf"--{section}\.", word):
            own.append(word)
            continue
        of_keys.append(word)
        if "=" not in word and rest and not rest[0].startswith("--"):
            of_keys.append(rest.pop(0))
    return own, of_keys


def _shipped(path: str) -> str | None:
    """Path of the configuration that the package brings as `train_configs/NAME.toml`, `NAME.toml` or NAME."""
    name = Path(path)
    if name.is_absolute() or ".." in name.parts or name.exists():
        return None
    inside = Path(*name.parts[1:]) if name.parts[:1] == (SHIPPED.name,) else name
    found = SHIPPED / inside.with_name(f"{inside.name.removesuffix('.toml')}.toml") if inside.name else SHIPPED
    return str(found) if found.is_file() else None


def read_toml(path: str) -> tuple[dict[str, Any], list[str]]:
    """Read a TOML file: of this path or, if there is none, the shipped configuration of this name.

    Returns:
        the document, empty if it cannot be read, and in that case one line with the reason.
    """
    try:
        path = _shipped(path) or path
        mode = Path(path).stat().st_mode
        if stat.S_ISDIR(mode):
            return {}, [f"{shown_file(path)}: is a folder (give a TOML file)"]
        if not stat.S_ISREG(mode):
            return {}, [f"{shown_file(path)}: is not a regular file (give a TOML file)"]
        with open(path, "rb") as file:
            content = file.read(_LARGEST_FILE + 1)
        if len(content) > _LARGEST_FILE:
            return {}, [f"{shown_file(path)}: is larger than {_LARGEST_FILE >> 20} MiB (is it a configuration?)"]
    except FileNotFoundError:
        return {}, [f"{shown_file(path)}: no such file (give a TOML file)"]
    except (OSError, ValueError) as failure:  # ValueError: a NUL in the path
        reason = failure.strerror if isinstance(failure, OSError) else failure
        return {}, [f"{shown_file(path)}: cannot be read: {reason}"]
    try:
        document = tomllib.loads(content.decode("utf-8-sig"))
        if _is_deep(document):
            raise RecursionError
        return document, []
    except UnicodeDecodeError as failure:
        return {}, [f"{shown_file(path)}: is not UTF-8 text, see byte {failure.start} (save it as UTF-8)"]
    except ValueError as failure:
        reason = unwrapped(failure)
        return {}, [f"{shown_file(path)}: TOML syntax: {reason if reason.isprintable() else quoted(reason, 200)}"]
    except RecursionError:
        return {}, [f"{shown_file(path)}: TOML syntax: nested too deeply"]


def _is_deep(document: dict[str, Any]) -> bool:
    """Check whether tables and lists are nested more deeply than any reader follows them."""
    level: list[Any] = [document]
    for _ in range(_DEEPEST):
        level = [
            inner for outer in level for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]  # fmt: skip
        if not level:
            return False
    return True


def shown_file(path: str) -> str:
    """Show a path in a message; quoted and cut where it would not print on one line."""
    return path if path.isprintable() and 0 < len(path) < 500 else quoted(path, 200)


def suggestion(key: str, known: Iterable[str], prefix: str = "") -> str:
    """Advice for an unknown dotted key: the nearest of the known ones, in whatever section it is.

    The last part of the name counts most, so that `training.lr` leads to `optimizer.lr`; a name that lacks words
    of the right one (`batch_size` for `local_batch_size`) is nearly as good as a whole one.
    """
    section, _, name = key[:100].rpartition(".")

    def likeness(candidate: str) -> tuple[float, float]:
        candidate_section, _, candidate_name = candidate.rpartition(".")
        score = SequenceMatcher(None, name, candidate_name).ratio()
        if score < 1 and set(name.split("_")) < set(candidate_name.split("_")):
            score = 0.95
        return score, score + 0.2 * SequenceMatcher(None, section, candidate_section).ratio()

    scored = {candidate: likeness(candidate) for candidate in known}
    close = [candidate for candidate, (score, _) in scored.items() if score >= 0.6]
    if not close:
        of_section = any(candidate.startswith(f"{section}.") for candidate in known)
        return f"--help {section} lists its keys" if of_section else "--help lists the sections"
    return f"did you mean {prefix}{max(close, key=lambda candidate: scored[candidate][1])}?"
