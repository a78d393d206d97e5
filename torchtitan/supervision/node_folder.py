"""Folder that the processes of one launch share on their machine, in memory: for small files that other machines need not
see.
"""

import hashlib
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from torchtitan.files.removal import remove_folder

_MEMORY = Path("/dev/shm")
_SECONDS_UNUSED = 3600.0  # after which a folder is taken for one that a killed launch has left


def node_folder(run_folder: Path, is_own: Callable[[str], bool]) -> Path:
    """Make this machine's folder of a run and its present launch; removes what killed ones have left.

    Processes with the same parent share it: those that a launcher has started on this machine.

    Args:
        run_folder: of the run.
        is_own: whether a file of this name is written into such folders; others are never removed.

    Raises:
        OSError: it cannot be made, or a folder of that name is another user's.
    """
    base = _MEMORY if os.access(_MEMORY, os.W_OK) else Path(tempfile.gettempdir())
    run = f"torchtitan-{os.getuid()}-{_digest(str(run_folder.resolve()))}-"
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    folder = base / f"{run}{_digest(f'{os.getppid()} {_started(os.getppid())} {restart}')}"
    folder.mkdir(mode=0o700, exist_ok=True)
    _refuse_foreign(folder)
    for other in base.glob(f"{run}*"):
        with suppress(OSError):
            if other != folder and time.time() - other.lstat().st_mtime > _SECONDS_UNUSED:
                _refuse_foreign(other)
                remove_folder(other, is_own)
    return folder


def _refuse_foreign(folder: Path) -> None:
    status = folder.lstat()
    if folder.is_symlink() or status.st_uid != os.getuid():
        raise PermissionError(f"{folder}: is another user's")


def _started(pid: int) -> str:
    """Start of a process since the machine's, as the kernel writes it; process numbers are used again."""
    with suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return ""


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
