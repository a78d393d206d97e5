"""Moments of a run at which a process can be made to kill itself, aimed at because random timing seldom meets them.

And a disk that is slow. The functions that a save goes through are replaced in that process alone; the program knows
nothing of it.
"""

import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchtitan.checkpoint import store as checkpoint_store
from torchtitan.checkpoint.host_copies import HostCopies
from torchtitan.training.clock import Phases

# How a process ends that was killed at a moment: in a write it is the kernel that does it, at a file's size.
KILLED = (-signal.SIGKILL, -signal.SIGXFSZ)


SLOW_DISK = "slow disk"


def arm(moment: str, occurrence: int) -> None:
    """Let this process die at the occurrence-th time (from 1) that it comes to a moment.

    Or, with SLOW_DISK, take so many tenths of a second whenever it brings something to the disk.
    """
    if moment == SLOW_DISK:
        return _slow_disk(occurrence / 10)
    MOMENTS[moment](_Countdown(occurrence))


class _Countdown:
    """Counts the times that a moment is met."""

    def __init__(self, occurrence: int) -> None:
        self._left = occurrence

    def is_over(self) -> bool:
        self._left -= 1
        return self._left == 0


def _slow_disk(seconds: float) -> None:
    fsync = os.fsync

    def slow(descriptor: int) -> None:
        time.sleep(seconds)
        fsync(descriptor)

    os.fsync = slow


def _die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _between_optimizer_and_average(countdown: _Countdown) -> None:
    begin = Phases._begin

    def beginning(self: Phases, name: str) -> None:
        if name == "ema" and countdown.is_over():
            _die()
        begin(self, name)

    Phases._begin = beginning


def _staging(countdown: _Countdown) -> None:
    take = HostCopies.take

    def half_taken(self: HostCopies, pieces: list) -> list:
        if countdown.is_over():
            take(self, pieces[: len(pieces) // 2])
            _die()
        return take(self, pieces)

    HostCopies.take = half_taken


def _write(countdown: _Countdown) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores it, to raise an OSError instead

    def hook(event: str, arguments: tuple) -> None:
        if _opens_new(event, arguments, "shard-") and countdown.is_over():
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))

    sys.addaudithook(hook)


def _manifest(countdown: _Countdown) -> None:
    def hook(event: str, arguments: tuple) -> None:
        if _opens_new(event, arguments, "manifest.json") and countdown.is_over():
            _die()

    sys.addaudithook(hook)


def _opens_new(event: str, arguments: tuple, name: str) -> bool:
    return event == "open" and "x" in (arguments[1] or "") and Path(os.fsdecode(arguments[0])).name.startswith(name)


def _rename(before: str, killed_first: bool, function: str = "rename") -> Callable[[_Countdown], None]:
    """A rename of what begins with `before`, by a function of os: killed before it is made, or after."""

    def prepare(countdown: _Countdown) -> None:
        rename = getattr(os, function)

        def dying(source: Any, *others: Any, **more: Any) -> None:
            now = Path(source).name.startswith(before) and countdown.is_over()
            if now and killed_first:
                _die()
            rename(source, *others, **more)
            if now:
                _die()

        setattr(os, function, dying)

    return prepare


def _delete(countdown: _Countdown) -> None:
    remove_folder = checkpoint_store.remove_folder

    def half_deleted(folder: Path, is_own: Callable[[str], bool]) -> list[Path]:
        if folder.name.startswith(".deleted-") and countdown.is_over():
            next(folder.iterdir()).unlink()
            _die()
        return remove_folder(folder, is_own)

    checkpoint_store.remove_folder = half_deleted


MOMENTS: dict[str, Callable[[_Countdown], None]] = {
    "after the optimizer": _between_optimizer_and_average,
    "in the staging": _staging,
    "in the write": _write,
    "before the manifest": _manifest,
    "before the rename": _rename(".step-", killed_first=True),
    "after the rename": _rename(".step-", killed_first=False),
    "before an old one goes": _rename("step-", killed_first=True),
    "before the final weights": _rename(".final-step-", killed_first=True, function="replace"),  # of a run `final`
    "in the delete of an old one": _delete,
}
