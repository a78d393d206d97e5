"""Ownership of a run's folder: a folder with files of others is never written into."""

import shlex
from pathlib import Path

from torchtitan.checkpoint.manifest import checkpoint_path, checkpoint_steps, read_json, read_manifest
from torchtitan.checkpoint.owner import OWNER_FILE
from torchtitan.config.job import JobConfig
from torchtitan.errors import DamagedFile
from torchtitan.files.ownership import foreign_entry
from torchtitan.files.regular import read_toml
from torchtitan.files.run_lock import LOCK_FILE, RunLock
from torchtitan.settings.record import CONFIG_HEADER

CONFIG_FILE = "config.toml"


def foreign_content(folder: Path) -> str | None:
    """Foreign content that forbids a folder to become a run's.

    A folder is a run's by its config.toml, its lock or a checkpoint, and may then hold anything else. One without any
    of them may only hold what a run writes before its config.toml.

    Returns:
        the name of a foreign entry in it; None where a run may write.

    Raises:
        OSError: it cannot be read.
    """
    # A lock of this process's would end where its file is closed after reading.
    is_run = RunLock.is_ours(folder) or _is_lock(folder / LOCK_FILE) or _has_checkpoint(folder)
    marks = {CONFIG_FILE: CONFIG_HEADER.encode()}
    return None if is_run else foreign_entry(folder, marks, is_own=lambda path: path.name == OWNER_FILE)


def moved_run_warning(config: JobConfig) -> str:
    """Warn where a configuration names another folder than the one of the run beside it, which was moved or copied; else ""."""
    file, trained = Path(config.job.config_file).resolve(), Path(config.job.dump_folder, config.job.name)
    if file.name != CONFIG_FILE or file.parent == trained.resolve() or not _has_checkpoint(file.parent):
        return ""
    recorded = read_toml(file).get("job", {})
    if recorded.get("name") != config.job.name or recorded.get("dump_folder", config.job.dump_folder) != config.job.dump_folder:
        return ""  # another one was asked for
    place = shlex.join([f"--job.dump_folder={file.parent.parent}", f"--job.name={file.parent.name}"])
    return f"{trained} is trained, not the run beside {file} (to continue that: {place})"


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
