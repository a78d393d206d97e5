"""Ownership of a run's folder: a folder with files of others is never written into."""

import json
import tomllib
from pathlib import Path

from torchtitan.checkpoint.manifest import checkpoint_path, checkpoint_steps, read_json, read_manifest
from torchtitan.errors import DamagedFile
from torchtitan.files.ownership import foreign_entry
from torchtitan.files.run_lock import LOCK_FILE
from torchtitan.settings.record import CONFIG_HEADER

CONFIG_FILE = "config.toml"

# What a run that begins writes before its first checkpoint.
_BEGUN_NAMES = frozenset((
    CONFIG_FILE, LOCK_FILE, "checkpoint", "checkpoint_owner.json", "ema", "faults", "gns", "metrics.jsonl", "samples", "tb",
    "wandb", "wandb_id",
))  # fmt: skip
_SECTIONS = ("job", "model", "training")
_MAX_BYTES = 1 << 20


def foreign_content(folder: Path) -> str | None:
    """Foreign content that forbids a folder to become a run's.

    A folder is a run's by its config.toml, its lock or a checkpoint, and may then hold anything else. One without any
    of them may only hold the remains of an interrupted start.

    Returns:
        the name of a foreign entry in it; None where a run may write.

    Raises:
        OSError: it cannot be read.
    """
    is_run = _is_lock(folder / LOCK_FILE) or _is_config(folder / CONFIG_FILE) or _has_checkpoint(folder)
    return None if is_run else foreign_entry(folder, is_own=_is_begun)


def _is_begun(path: Path) -> bool:
    return path.name in _BEGUN_NAMES and (path.name not in (CONFIG_FILE, "metrics.jsonl") or _may_be_cut_off(path))


def _is_config(path: Path) -> bool:
    try:
        if path.is_symlink() or not path.is_file():
            return False
        with open(path, "rb") as file:
            text = file.read(_MAX_BYTES).decode()
        return text.startswith(CONFIG_HEADER) or all(isinstance(tomllib.loads(text).get(name), dict) for name in _SECTIONS)
    except (OSError, ValueError):
        return False


def _is_lock(path: Path) -> bool:
    try:
        return read_json(path, dict, 4096).keys() == {"host", "pid", "started"}
    except DamagedFile:
        return False


def _has_checkpoint(folder: Path) -> bool:
    for step in checkpoint_steps(folder / "checkpoint"):
        try:
            read_manifest(checkpoint_path(folder / "checkpoint", step))
            return True
        except DamagedFile:
            continue
    return False


def _may_be_cut_off(path: Path) -> bool:
    """Check whether a file may be a run's after a power cut: empty, zeros, or lines of metrics."""
    if path.is_symlink() or not path.is_file():
        return False
    with open(path, "rb") as file:
        start = file.read(_MAX_BYTES).strip(b"\0\n")
    if not start or path.name == CONFIG_FILE:
        return not start
    try:
        return "step" in json.loads(start.split(b"\n")[0])
    except (ValueError, TypeError):
        return b"\n" not in start and start.startswith(b'{"step"')
