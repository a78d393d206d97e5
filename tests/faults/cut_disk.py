"""A disk whose power can be cut: a file system in an image file, mounted by a loop device, by root on Linux.

A cut leaves what the file system had handed to the device at that moment: what a program has written and not synced
is in the memory of the mounted file system, and goes. The mounts commit by themselves as late, and look after programs
that do not sync as little, as they can be made to.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class FileSystem:
    """How to make a file system, its size, and how to mount it."""

    program: str
    make: tuple[str, ...]
    mebibytes: int
    options: str


FILE_SYSTEMS = {
    # A rename brings nothing to the disk that was not synced.
    "ext4": FileSystem("mkfs.ext4", ("-q", "-F", "-m", "0"), 96, "commit=300,noauto_da_alloc"),
    # Names and sizes may be there before the content: a file of the right length with nothing in it.
    "ext4, content late": FileSystem(
        "mkfs.ext4", ("-q", "-F", "-m", "0"), 96, "commit=300,noauto_da_alloc,nodelalloc,data=writeback"
    ),
    # A sync brings one file or one folder to the disk, and nothing else.
    "btrfs": FileSystem("mkfs.btrfs", ("-q", "-f", "-M", "-m", "single"), 128, "commit=300"),
    "xfs": FileSystem("mkfs.xfs", ("-q", "-f"), 320, ""),
}
_MEMORY = "size=2g"
_TRIES = 200


class CannotMount(Exception):
    """This process may not mount file systems, or a program for it is missing; the message says what."""


def known_file_systems() -> list[str]:
    """Names of those that this machine can make, first the one that needs no package."""
    return [name for name, kind in FILE_SYSTEMS.items() if shutil.which(kind.program)]


@contextlib.contextmanager
def cut_disks() -> Iterator[Callable[[str], "CutDisk"]]:
    """From the name of a file system to a new disk; all are unmounted and gone in the end. Raises CannotMount."""
    if sys.platform != "linux" or os.geteuid() != 0:
        raise CannotMount("file systems in files are mounted by root on Linux alone")
    made: list[CutDisk] = []
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        _call("mount", "-t", "tmpfs", "-o", _MEMORY, "tmpfs", place)  # images are copied from memory
        try:

            def make(name: str) -> CutDisk:
                made.append(CutDisk(place / str(len(made)), FILE_SYSTEMS[name]))
                return made[-1]

            yield make
        finally:
            subprocess.run(["umount", "-R", "-l", place], check=True)


class CutDisk:
    """One file system: path, where it is mounted after every cut, and cuts, how often its power was cut."""

    def __init__(self, place: Path, kind: FileSystem) -> None:
        """place: a new folder, of which everything is the disk's. Raises CannotMount."""
        self.path, self.cuts = place / "mounted", 0
        self._kind, self._image = kind, place / "image"
        self.path.mkdir(parents=True)
        with open(self._image, "wb") as file:
            file.truncate(kind.mebibytes << 20)
        _call(kind.program, *kind.make, self._image)
        self._mount()

    def sync(self) -> None:
        """Let everything that is there now outlast a cut."""
        subprocess.run(["sync", "-f", self.path], check=True)

    def cut(self, stop_writers: Callable[[], None]) -> None:
        """Cut the power, and mount what is left; stop_writers: ends every process on the disk after that moment."""
        after = self._image.with_name("after")
        self._copy(after)
        stop_writers()
        self.remove()
        after.replace(self._image)
        self.cuts += 1
        self._mount()

    def remove(self) -> None:
        _call("umount", self.path)

    def _copy(self, target: Path) -> None:
        """Copy the image of one moment.

        A disk may write what it was given between two flushes in any order, but nothing across one: a copy is of a
        moment if no flush came while it was made.
        """
        for _ in range(_TRIES):
            before = self._flushes()
            _copy_sparse(self._image, target)
            if self._flushes() == before:
                return
        raise AssertionError(f"{self.path}: no moment without a flush in {_TRIES} tries")

    def _flushes(self) -> int:
        """Flushes that the loop device has been given so far."""
        mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
        device = next(Path(source).name for source, where, *_ in mounts if where == str(self.path))
        return int(Path(f"/sys/block/{device}/stat").read_text().split()[15])

    def _mount(self) -> None:
        options = ",".join(filter(None, ("loop", self._kind.options)))
        _call("mount", "-o", options, self._image, self.path)


def _copy_sparse(source: Path, target: Path) -> None:
    """Copy what of a file is not a hole."""
    with open(source, "rb", buffering=0) as old, open(target, "wb", buffering=0) as new:
        size = os.fstat(old.fileno()).st_size
        new.truncate(size)
        end = 0
        while True:
            try:
                begin = os.lseek(old.fileno(), end, os.SEEK_DATA)
            except OSError:  # only a hole is left
                return
            end = os.lseek(old.fileno(), begin, os.SEEK_HOLE)
            while begin < end:
                begin += os.copy_file_range(old.fileno(), new.fileno(), end - begin, begin, begin)


def _call(*command: str | Path) -> None:
    """Run a program. Raises CannotMount with what it says."""
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise CannotMount(f"{command[0]} is not installed") from error
    if done.returncode:
        raise CannotMount(f"{' '.join(map(str, command))}: {' '.join(done.stderr.split())}")
