"""Owner of a folder of checkpoints outside of the run's own: no two runs share one.

The run's folder and that of its checkpoints each hold a file with the same random identity. The checkpoints' file also
names the launch that wrote there last.
"""

import json
import os
import socket
import uuid
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from torchtitan.checkpoint.manifest import read_json
from torchtitan.errors import DamagedFile
from torchtitan.files.durable import make_folder, replace_file
from torchtitan.files.remote_path import AnyPath, RemotePath

OWNER_FILE = "checkpoint_owner.json"
_MAX_BYTES = 4096


def claim(run: Path, folder: AnyPath, begin: Callable[[], None] = lambda: None) -> str | None:
    """Claim a folder of checkpoints for this run and launch, called `begin`; return why that is impossible, if so.

    Raises OSError, and what `begin` does.
    """
    identity, owner = _identity(run), read_owner(folder)
    if owner is not None and (identity is None or owner.get("run") != identity):
        return (
            f"checkpoint.folder: {folder}: holds the checkpoints of another run, {shown_owner(owner)} "
            f"(give another --job.name or --checkpoint.folder, or, "
            f"to resume that run, copy its {OWNER_FILE} from there into {run})"
        )
    begin()
    identity = identity or uuid.uuid4().hex
    _write(run / OWNER_FILE, {"run": identity})
    mine = {
        "run": identity, "launch": uuid.uuid4().hex, "host": socket.gethostname(), "pid": os.getpid(),
        "started": datetime.now().isoformat(" ", "seconds"),
    }  # fmt: skip
    _write(folder / OWNER_FILE, mine)
    if (now := read_owner(folder)) != mine:
        return f"checkpoint.folder: {folder}: another run began here at the same moment, {shown_owner(now)} (start again)"
    return None


def is_of_another_run(run: Path, folder: AnyPath) -> bool:
    """Check whether a folder of checkpoints has an owner other than this run. Raises StoreError."""
    owner, mine = read_owner(folder), _identity(run)
    return mine is not None and (owner or {}).get("run") not in (None, mine)


def read_owner(folder: AnyPath) -> dict | None:
    """Read a folder's owner file: {} for a damaged one, None for none. Raises StoreError."""
    try:
        return read_json(folder / OWNER_FILE, dict, _MAX_BYTES)
    except DamagedFile as error:
        return None if isinstance(error.__cause__, FileNotFoundError | NotADirectoryError) else {}


def shown_owner(owner: dict | None) -> str:
    """Describe the owner in words."""
    try:
        host, pid, started = (str((owner or {})[key])[:80] for key in ("host", "pid", "started"))
    except (KeyError, TypeError):
        return f"whose {OWNER_FILE} is damaged"
    return ascii(f"started {started} on host {host}, process {pid}").strip("'\"")


def _identity(run: Path) -> str | None:
    identity = (read_owner(run) or {}).get("run")
    return identity if isinstance(identity, str) else None


def _write(path: AnyPath, content: dict) -> None:
    text = (json.dumps(content) + "\n").encode()
    if isinstance(path, RemotePath):
        path.write_bytes(text)
        return
    make_folder(path.parent)
    replace_file(path, text)
