"""Location of a run's checkpoints: its own folder, or below `checkpoint.folder`, a path or a remote store's URL."""

import importlib
import re
from pathlib import Path
from urllib.parse import urlsplit

from torchtitan.checkpoint.manifest import checkpoint_steps
from torchtitan.checkpoint.owner import is_of_another_run
from torchtitan.errors import CheckpointError
from torchtitan.extras import install_packages
from torchtitan.files.regular import read_toml
from torchtitan.files.remote_path import AnyPath, RemotePath

_LARGEST_CONFIG = 16 << 20  # bytes
_ONE_SLASH = re.compile(r"[a-z][a-z0-9]+:/")


def checkpoint_folder(run: Path, folder: str, name: str) -> AnyPath:
    """Folder of a run's checkpoints. Raises StoreError: the store cannot be opened."""
    if not folder:
        return run / "checkpoint"
    return location(folder) / name


def location(text: str) -> AnyPath:
    """Open a path or URL. Raises CheckpointError."""
    if "://" not in text:
        return Path(text)
    if problem := folder_problem(text):
        raise CheckpointError(f"{shown_url(text)}: {problem}")
    return RemotePath.from_url(text)


def run_checkpoints(run: AnyPath) -> AnyPath:
    """Folder of an existing run's checkpoints, from its config.toml; a URL, or a folder of checkpoints, is that folder itself.

    Raises:
        CheckpointError: config.toml cannot be read and the run's folder holds none; or the store cannot be opened.
    """
    own = run / "checkpoint"
    if isinstance(run, RemotePath):
        return run
    path = run / "config.toml"
    try:
        config = read_toml(path, _LARGEST_CONFIG)
        folder, name = config.get("checkpoint", {}).get("folder", ""), config.get("job", {}).get("name", run.name)
        if not isinstance(folder, str) or not isinstance(name, str):
            raise ValueError("checkpoint.folder or job.name is no text")
    except FileNotFoundError:
        return run if checkpoint_steps(run) else own
    except (OSError, ValueError, AttributeError) as error:
        if own.is_dir():
            return own
        raise CheckpointError(f"{path}: is damaged, and names the checkpoints' folder (put a copy back)") from error
    try:
        found = checkpoint_folder(run, folder, name)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: checkpoint.folder: {error}") from error
    if folder and isinstance(found, Path) and not found.is_absolute() and is_of_another_run(run, found):
        advice = "it is relative to the folder that the run was started in: work from there"
        raise CheckpointError(f"{path}: checkpoint.folder: {found}: holds the checkpoints of another run ({advice})")
    return found


def folder_problem(text: str) -> str | None:
    """Problem of a `checkpoint.folder`, as far as known without asking the store."""
    if "://" not in text:
        return "a store's URL has two slashes, protocol://bucket/prefix" if _ONE_SLASH.match(text) else None
    from fsspec.registry import available_protocols, get_filesystem_class, known_implementations

    protocol, _, rest = text.partition("://")
    if "::" in text or "?" in text or "#" in text:
        return "must be protocol://bucket/prefix and nothing else (options come from the environment)"
    if "@" in urlsplit(text).netloc and ":" in urlsplit(text).netloc.rpartition("@")[0]:
        return "must not hold a password, which would be written to config.toml (credentials come from the environment)"
    if protocol not in available_protocols():
        return f"{protocol} is no protocol that fsspec knows (s3, gs, az, hf, sftp, file and others)"
    try:
        get_filesystem_class(protocol)
    except ImportError:
        package = known_implementations[protocol]["class"].partition(".")[0]
        try:
            importlib.import_module(package)
        except ImportError:
            return f"needs the package {package}, which is not installed ({install_packages(package)})"
        return f"the package {package} cannot be used for it: {known_implementations[protocol].get('err', '')}"
    if not rest.strip("/") and protocol != "memory":
        return "names no bucket or folder (write protocol://bucket/prefix)"
    return None


def shown_url(text: str) -> str:
    """Printable URL: without user and password before the host."""
    protocol, _, rest = text.partition("://")
    place, slash, path = rest.partition("/")
    return f"{protocol}://{place.rpartition('@')[2]}{slash}{path}".partition("?")[0]
