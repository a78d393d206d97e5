"""End processes with their launcher, however the launcher ends. Imports the standard library only.

    python -S parent_death.py PARENT COMMAND...    run a command that ends with its parent, the process PARENT

Only Linux has the signal; elsewhere a killed launcher's processes end when they next wait for one another. Launch
scripts run this file with the system's `python3`: it keeps to Python 3.6.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_parent(parent: int) -> bool:
    """Ask the kernel to kill this process as soon as its parent ends, at once if that is gone; a later `exec` keeps it.

    For the kernel the parent ends with the thread that started this process: that must be its main thread.

    Args:
        parent: process id that the parent has or had.

    Returns:
        True if the kernel agreed; False without such a signal, or for another's child, as a fork server's.
    """
    if sys.platform != "linux":
        return False
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0, 0, 0, 0)
        return False
    return True


def end_with_launcher() -> None:
    """End with torchrun, if torchrun started this process: by SIGKILL, before it can wait for ranks that are gone."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        parent = os.getppid()
        if not end_with_parent(parent) and sys.platform == "linux":
            os.kill(os.getpid(), signal.SIGKILL)  # it ended between those two lines


def main(words: "list[str]") -> int:
    parent, command = int(words[0]), words[1:]
    if not end_with_parent(parent) and sys.platform == "linux" and not os.path.exists(f"/proc/{parent}"):
        return 128 + signal.SIGKILL
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]}: cannot be started: {error.strerror}", file=sys.stderr)
        return 127


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
