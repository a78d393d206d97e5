"""Plugins: a user's Python files, or installed packages, that add entries to the registries of the program.

A plugin adds a network, dataset, objective and the like by the line that the program itself has for it, such as
`MODELS["mixer"] = FAMILY`. It is named in `job.plugins`; what a run's folder or a file of weights names is never executed.
"""

import hashlib
import importlib.metadata
import importlib.util
import json
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path

from torchtitan.errors import one_line

ENTRY_POINTS = "torchtitan_dit.plugins"  # group in which a package names its plugin

_files: dict[str, tuple[Path, str]] = {}  # name of a module -> its file, and the SHA-256 of what was loaded
_loaded: dict[str, str] = {}  # name in `job.plugins` -> SHA-256 of the file, or version of the package


class PluginError(Exception):
    """Plugin that cannot be loaded; the message is one line."""


def plugin_names(text: str) -> list[str]:
    """Names in a text of the command line: a JSON list, or names between commas. Raises ValueError: a list with an error."""
    return json.loads(text) if text.startswith("[") else text.split(",")


def load_plugins(names: Iterable[str]) -> None:
    """Load plugins, each once in a process.

    Args:
        names: Python files, ending in .py, or entry points in the group `torchtitan_dit.plugins` of installed packages.

    Raises:
        PluginError.
    """
    for name in names:
        if name not in _loaded:
            _loaded[name] = _load_file(name) if name.endswith(".py") else _load_package(name)


def require_unchanged(names: Iterable[str]) -> None:
    """Require of files that this process has loaded that it runs what they hold now. Raises PluginError."""
    for name in names:
        path = Path(name).expanduser().resolve()
        known, version = _files.get(path.stem, (path, ""))
        if version and known == path and path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() != version:
            raise PluginError(f"{name}: has changed since this process loaded it (start Python again)")


def as_loaded(names: Iterable[str]) -> list[str]:
    """Names of a record's plugins for another process: of files as loaded here, which may be elsewhere than recorded."""
    there = {path.name: str(path) for path, _ in _files.values()}
    return list(dict.fromkeys(there.get(Path(name).name, name) for name in names))


def loaded_plugins() -> dict[str, str]:
    """Name -> SHA-256 of each file, or version of each package, that this process has loaded."""
    return dict(_loaded)


def plugin_words(names: list[str]) -> list[str]:
    """Words of a command line that name plugins, beside a record that does; none for no plugin."""
    return [f"--job.plugins={json.dumps(names)}"] if names else []


def unloaded(names: Iterable[str]) -> list[str]:
    """Those of a record's plugins of which this process has loaded none with that file name."""
    there = {Path(name).name for name in _loaded}
    return [name for name in names if Path(name).name not in there]


def _load_package(name: str) -> str:
    points = [*importlib.metadata.entry_points(group=ENTRY_POINTS, name=name)]
    if not points:
        raise PluginError(f"{name}: no installed package has a plugin of this name, and a file's ends in .py")
    try:
        points[0].load()
    except Exception as error:  # whatever the package raises
        raise PluginError(f"{name}: {one_line(error)}") from error
    return points[0].dist.version if points[0].dist else ""


def _load_file(name: str) -> str:
    """Import a file under its own name, as processes that are spawned later import it to unpickle its classes."""
    path = Path(name).expanduser().resolve()
    try:
        content = path.read_bytes()
    except OSError as error:
        missing = "no such file" if str(path) == name else f"no such file (looked for {path})"
        raise PluginError(f"{name}: {missing if isinstance(error, FileNotFoundError) else error.strerror}") from error
    if not path.stem.isidentifier():
        raise PluginError(f"{name}: is no name of a Python module (use letters, digits and _)")
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    try:
        found = importlib.util.find_spec(path.stem)
    except ValueError:  # a module without a file, as __main__
        found = None
    if found is None or found.origin is None or Path(found.origin).resolve() != path:
        raise PluginError(f"{name}: another module is called {path.stem} here (rename the file)")
    try:
        importlib.import_module(path.stem)
    except Exception as error:  # whatever the user's code raises
        lines = [each.lineno for each in traceback.extract_tb(error.__traceback__) if Path(each.filename).resolve() == path]
        if isinstance(error, SyntaxError):
            error.args = (error.msg,)  # without its place, which may be of a file that this one imports
            lines = [error.lineno] if error.filename == str(path) else lines
        raise PluginError(f"{name}{f', line {lines[-1]}' if lines else ''}: {one_line(error)}") from error
    return _files.setdefault(path.stem, (path, hashlib.sha256(content).hexdigest()))[1]
