"""A command as a process of its own, and what the kernel saw it do to files and programs."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import matplotlib.font_manager  # lists the fonts, unless that was done; a program that draws would, in its own home

from tests.faults.hostile_process import Command, Outcome
from tests.forked import ROOT

_CALL = re.compile(r"^\d+ +(\w+)\((.*)\) += (-?\d+)")
_PATH = re.compile(r'(?:(?:AT_FDCWD|\d+)(?:<([^>]*)>)?, )?"((?:[^"\\]|\\.)*)"')
_CHANGES = {
    "rename", "renameat", "renameat2", "unlink", "unlinkat", "rmdir", "mkdir", "mkdirat", "link", "linkat", "symlink",
    "symlinkat", "chmod", "fchmodat", "truncate", "mknod", "mknodat", "chown", "lchown", "fchownat", "creat",
}  # fmt: skip
_OPENED_TO_WRITE = re.compile(r"O_WRONLY|O_RDWR|O_CREAT|O_TRUNC|O_APPEND")
# Shared memory of loaders and locks, and what the system gives any process.
_OWN_PLACES = ("/dev/shm", "/dev/null", "/dev/tty", "/proc/self", "/proc/thread-self")
_OWN_PROGRAMS = ("git", "lscpu", "uname", Path(sys.executable).resolve().name, "python", "python3")


def run_traced(command: Command, log: Path, seconds: float = 120.0) -> Outcome:
    """Run it under strace; what it changed elsewhere or started is in the outcome's events."""
    words = ["strace", "-f", "-y", "-qq", "-s", "4096", "-e", "trace=%file,execve", "-e", "signal=none", "-o", str(log)]
    environment = {"PYTHONDONTWRITEBYTECODE": "1", "MPLCONFIGDIR": matplotlib.get_cachedir()}
    start = time.monotonic()
    ended = subprocess.run(
        [*words, sys.executable, *command.words], cwd=ROOT, env=command.environment | environment, capture_output=True,
        stdin=subprocess.DEVNULL, timeout=seconds, preexec_fn=command.before,
    )  # fmt: skip
    events = [event for line in log.read_text(errors="replace").splitlines() for event in _seen(line, command.allowed)]
    return Outcome(ended.returncode, ended.stdout, ended.stderr, time.monotonic() - start, 0, events)


def _seen(line: str, allowed: tuple[str, ...]) -> list[str]:
    match = _CALL.match(line)
    if match is None or int(match[3]) < 0:  # what failed changed nothing
        return []
    name, arguments = match[1], match[2]
    paths = [os.path.join(folder, path) for folder, path in _PATH.findall(arguments)]
    if name == "execve":
        started = os.path.basename(os.path.realpath(paths[0]))
        own = {os.path.basename(paths[0]), started} & set(_OWN_PROGRAMS)
        return [] if own else [f"started {paths[0]}"]
    if not (name in _CHANGES or name in ("open", "openat", "openat2") and _OPENED_TO_WRITE.search(arguments)):
        return []
    places = tuple(os.path.realpath(each) for each in allowed) + _OWN_PLACES
    concerned = paths[-1:] if name.startswith("symlink") else paths
    return [f"{name} {path}" for path in concerned
            if not _inside(os.path.realpath(os.path.dirname(path)), path, places)]  # fmt: skip


def _inside(parent: str, path: str, places: tuple[str, ...]) -> bool:
    whole = os.path.join(parent, os.path.basename(path))
    return any(whole == place or whole.startswith(place + "/") for place in places)
