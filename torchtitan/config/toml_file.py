"""TOML file of a configuration: of a path, or one that the package brings."""

import json
import shlex
from pathlib import Path
from typing import Any

from torchtitan.errors import ConfigError, unwrapped
from torchtitan.files import regular
from torchtitan.programs import program
from torchtitan.settings.plugins import PluginError, load_plugins, plugin_names, unloaded
from torchtitan.settings.record import CONFIG_HEADER
from torchtitan.settings.schema import nearest, quoted

SHIPPED = Path(__file__).resolve().parents[1] / "train_configs"


def shipped(path: str) -> str | None:
    """Path of the configuration that the package brings as `train_configs/NAME.toml`, `NAME.toml` or NAME."""
    name = Path(path)
    if name.is_absolute() or ".." in name.parts or (name.exists() and not name.is_dir()):
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
        path = shipped(path) or path
        return regular.read_toml(path), []
    except FileNotFoundError:
        known = [file.relative_to(SHIPPED).with_suffix("").as_posix() for file in SHIPPED.rglob("*.toml")]
        name = path.removeprefix(f"{SHIPPED.name}/").removesuffix(".toml")
        guess = next((each for each in known if each.endswith(f"/{name}")), "") or nearest(name, known)
        reason = f"no such file ({f'did you mean {guess}?' if guess else 'give a TOML file'})"
    except regular.UnsuitableFile as failure:
        reason = f"{failure.strerror} (give a TOML file)"
    except UnicodeDecodeError as failure:
        binary = Path(path).suffix in (".safetensors", ".pt", ".pth")
        advice = "it holds weights: give a TOML file" if binary else "save it as UTF-8"
        reason = f"is not UTF-8 text, see byte {failure.start} ({advice})"
    except OSError as failure:
        reason = f"cannot be read: {failure.strerror}"
    except ValueError as failure:
        reason = f"TOML syntax: {unwrapped(failure)}"
    return {}, [f"{shown_file(path)}: {reason}"]


def read_configuration(path: str) -> tuple[dict[str, Any], list[str]]:
    """Read a configuration's TOML file, as `read_toml`; a grid of runs is none."""
    document, failure = read_toml(path)
    if "axes" in document:
        return {}, [f"{shown_file(path)}: is a grid of runs, which {program('sweep')} trains (give the configuration of one run)"]
    return document, failure


def _is_record(path: str) -> bool:
    """Whether a file that can be read is the record of a run, or lies where a run's folder has it."""
    return Path(path).name == "config.toml" or regular.read_text(shipped(path) or path).startswith(CONFIG_HEADER)


def load_named_plugins(flags: dict[str, str], path: str | None, document: dict[str, Any]) -> None:
    """Load the plugins that the command line names, or else the file; those of a run's record are not executed.

    Raises:
        ConfigError: one cannot be loaded, or the record names one that the user has not named.
    """
    job = document.get("job")
    names = job.get("plugins", []) if isinstance(job, dict) else []
    try:
        if "job.plugins" in flags:
            names = plugin_names(flags["job.plugins"])
            flags["job.plugins"] = json.dumps(names)
        elif names and path and _is_record(path):
            if missing := unloaded(names):
                trusted = f"if you trust {'them' if missing[1:] else 'it'}, in Python load_plugins({missing})"
                advice = f"add --job.plugins {shlex.quote(','.join(names))} {trusted}"
                raise ConfigError([f"{shown_file(path)}: job.plugins: the code that a run names is not executed ({advice})"])
            return
        if isinstance(names, list) and all(isinstance(name, str) for name in names):  # else it is refused as a value
            load_plugins(names)
    except (PluginError, ValueError) as error:
        place = "command line: --" if "job.plugins" in flags else f"{shown_file(path or '')}: "
        raise ConfigError([f"{place}job.plugins: {error}"]) from error


def shown_file(path: str) -> str:
    """Show a path in a message; quoted and cut where it would not print on one line."""
    return path if path.isprintable() and 0 < len(path) < 500 else quoted(path, 200)
