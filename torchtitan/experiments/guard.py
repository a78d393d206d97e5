"""Guard: run a command of which no process outlives the caller.

    python guard.py MEMORY_LIMIT_BYTES COMMAND...     (limit 0: none)

Standard input is a lifeline: at its end, because it was closed or because the other side was killed, the command and
all its descendants are killed, also those in other sessions, as torchrun's workers are. Processes that remain after the
command's end are killed as well. SIGTERM is passed on to the command. Exit code: the command's, 128 + signal if a
signal ended it.

This file imports the standard library only: it is started for every run.
"""

import ctypes
import os
import resource
import select
import signal
import subprocess
import sys
from pathlib import Path

_PARENT_DEATH = Path(__file__).resolve().parents[1] / "processes" / "parent_death.py"
_POLL_SECONDS = 0.05
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


def main(words: list[str]) -> int:
    limit, command = int(words[0]), words[1:]
    _adopt_orphans()
    if limit:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        soft = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
    # So that it ends even if this guard is killed.
    command = [sys.executable, "-S", str(_PARENT_DEATH), str(os.getpid()), *command]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    try:
        while (code := process.poll()) is None:
            readable, _, _ = select.select([0], [], [], _POLL_SECONDS)
            if readable and not os.read(0, 1024):
                code = -signal.SIGKILL
                break
    finally:
        kill_descendants(os.getpid())
    return code if code >= 0 else 128 - code


def kill_descendants(root: int) -> None:
    """Kill all processes below `root`, repeatedly until none of them is alive."""
    while found := _descendants(root):
        for pid in found:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        _bury()


def _bury() -> None:
    """Reap dead children, so that they vanish from the table of processes."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def _adopt_orphans() -> None:
    """Adopt orphans: on Linux, become the parent of descendants whose parent dies, so that they can be found."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _descendants(root: int) -> list[int]:
    # Dead ones are followed too: a process may have died after its child was listed with it as the parent.
    children: dict[int, list[int]] = {}
    dead = set()
    for pid, parent, alive in _processes():
        children.setdefault(parent, []).append(pid)
        if not alive:
            dead.add(pid)
    found, waiting = [], [root]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return [pid for pid in found if pid not in dead]


def _processes() -> list[tuple[int, int, bool]]:
    """Processes: (pid, pid of the parent, whether it is alive) of each; unreaped dead ones included."""
    if sys.platform != "linux":
        table = subprocess.run(["ps", "-A", "-o", "pid=,ppid=,stat="], capture_output=True, text=True).stdout
        entries = [line.split() for line in table.splitlines()]
        # `ps` itself is among them, and gone.
        return [(int(pid), int(parent), state[0] != "Z" and _exists(int(pid))) for pid, parent, state in entries]
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent, *_ = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        found.append((int(path.parent.name), int(parent), state not in "ZX"))
    return found


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
