"""Status file `<run>/status.json`: the end of a run, for the script that started it.

    {"status": "completed" | "requeue" | "failed" | "refused" | "busy", "exit_code": of the processes, "reason": in words}

requeue: a signal interrupted the run, and a checkpoint was saved to resume from. busy: another process writes into the
folder; nothing was done. The file is missing during a run. torchrun turns every child's failure into 1, so a launch
script reads this instead of the exit code: it may name another file in TRAIN_STATUS_FILE, which every rank writes, also
on a machine without the run's folder, and also where the run was refused and the folder belongs to another one.
"""

import json
import os
from contextlib import suppress
from pathlib import Path

from torchtitan.errors import RunFolderError
from torchtitan.files.durable import replace_file
from torchtitan.files.optional import OptionalOutputs
from torchtitan.processes.launch import launch_number

STATUS_FILE = "status.json"
STATUS_VARIABLE = "TRAIN_STATUS_FILE"


def write_status(run_folder: Path | None, status: str, exit_code: int, reason: str = "") -> None:
    """Write the end of the run, wherever that is possible.

    Args:
        run_folder: of the run; None if this process must not write there.
    """
    content = {"status": status, "exit_code": exit_code} | ({"reason": reason} if reason else {})
    places = [run_folder / STATUS_FILE] if run_folder else []
    if os.environ.get(STATUS_VARIABLE):
        places.append(Path(os.environ[STATUS_VARIABLE]))
    for path in places:
        with OptionalOutputs().attempt("the status", path, consequence=f"the run has ended: {status}"):
            replace_file(path, json.dumps(content, indent=1) + "\n")


def forget_earlier_status() -> None:
    """Empty TRAIN_STATUS_FILE where torchrun has started this process again: it has the end of the process before."""
    if os.environ.get(STATUS_VARIABLE) and launch_number("TORCHELASTIC_RESTART_COUNT", 0) and launch_number("LOCAL_RANK", 0) == 0:
        with suppress(OSError):
            Path(os.environ[STATUS_VARIABLE]).write_text("")


def remove_status(run_folder: Path) -> None:
    """Remove the status of a resumed run. Raises RunFolderError: a launch script would read it again."""
    path = run_folder / STATUS_FILE
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise RunFolderError([f"{path}: cannot be removed: {error.strerror}"]) from error
