"""Members of plain tar archives, read in place by offset and size."""

import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from torchtitan.data.base import DatasetError
from torchtitan.data.image_decoding import MAX_FILE_BYTES
from torchtitan.data.image_files import PackedNames, shown_path
from torchtitan.data.saved_index import Advance
from torchtitan.data.tar_headers import BLOCK, REGULAR, SPECIAL, Entry, TarError, walk
from torchtitan.files.regular import check_regular, open_regular

MAX_OPEN_ARCHIVES = 64
COMPRESSIONS = {b"\x1f\x8b\x08": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}


class Member(NamedTuple):
    """Member: a file inside an archive."""

    name: bytes
    offset: int  # of its content, in bytes from the beginning of the archive
    size: int  # bytes


def read_members(path: Path, advance: Advance = lambda count: None, nested: bool = False) -> Iterator[Member]:
    """Read the regular files of a plain tar archive, in its order.

    Args:
        path: the archive.
        advance: called with the number of bytes read since the last call.
        nested: instead of each member that is an archive itself, give its members, as "archive.tar/member".

    Raises:
        DatasetError: it cannot be read, is compressed, cut short or damaged, or holds a link, a pipe or the like.
    """
    with _opened(path) as file:
        descriptor = file.fileno()
        size = os.fstat(descriptor).st_size

        def read_at(offset: int, count: int) -> bytes:  # the caller may have read elsewhere
            return os.pread(descriptor, count, offset)

        head = read_at(0, BLOCK)
        kind = next((kind for magic, kind in COMPRESSIONS.items() if head.startswith(magic)), "")
        if kind and head[257:262] != b"ustar":  # a member's name may begin like one
            raise DatasetError(f"{path}: is compressed ({kind}); decompress it to read from it in place")
        gone = 0
        for member in _checked(path, walk(read_at, 0, size)):
            if nested and member.name.endswith(b".tar"):
                for inner in _checked(path, walk(read_at, member.offset, member.offset + member.size)):
                    yield Member(member.name + b"/" + inner.name, inner.offset, inner.size)
            else:
                yield member
            advance(member.offset + member.size - gone)
            gone = member.offset + member.size


def _checked(path: Path, entries: Iterator[Entry]) -> Iterator[Member]:
    """Give the regular files among the entries. Raises DatasetError: damage, or a file that cannot be read in place."""
    try:
        for entry in entries:
            if entry.kind in SPECIAL:
                advice = "pack it again with tar --hard-dereference --dereference, without --sparse"
                kind, name = SPECIAL[entry.kind], shown_path(entry.name)
                raise DatasetError(f"{path}: {name!r} is {kind}, which cannot be read in place ({advice})")
            if entry.kind in REGULAR:
                yield Member(entry.name, entry.offset, entry.size)
    except TarError as error:
        raise DatasetError(f"{path}: {error} (copy it again)") from error


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    try:
        with open_regular(path) as file:
            yield file
    except OSError as error:
        raise DatasetError(f"{path}: cannot be read: {error.strerror or error}") from error


class OpenArchives:
    """Open archives, read by offset, the last few kept open; a copy in another process opens its own."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = tuple(paths)
        self._descriptors: OrderedDict[int, int] = OrderedDict()

    def read(self, archive: int, offset: int, size: int) -> bytes:
        """Read bytes. Raises OSError, or ValueError where the archive is shorter than that, or no image is as large."""
        if size > MAX_FILE_BYTES:
            raise ValueError(f"{size:,} bytes, more than {MAX_FILE_BYTES:,}")
        if archive not in self._descriptors:
            if len(self._descriptors) >= MAX_OPEN_ARCHIVES:
                os.close(self._descriptors.popitem(last=False)[1])
            check_regular(self.paths[archive])
            self._descriptors[archive] = os.open(self.paths[archive], os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        self._descriptors.move_to_end(archive)
        content = os.pread(self._descriptors[archive], size, offset)  # processes that share it share no position
        if len(content) < size:
            raise ValueError(f"the archive is cut short at byte {offset + len(content)}")
        return content

    def __getstate__(self) -> dict:
        return {"paths": self.paths, "_descriptors": OrderedDict()}

    def __del__(self) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)


@dataclass(frozen=True)
class TarImages:
    """Images inside archives.

    Attributes:
        archives: the files.
        archive: number of each image's archive, int32 [N].
        offsets, sizes: bytes, int64 [N].
    """

    archives: OpenArchives
    archive: np.ndarray
    offsets: np.ndarray
    sizes: np.ndarray
    names: PackedNames

    def __len__(self) -> int:
        return len(self.archive)

    def content(self, position: int) -> bytes:
        return self.archives.read(
            int(self.archive[position]), int(self.offsets[position]), int(self.sizes[position])
        )

    def shown(self, position: int) -> str:
        archive = self.archives.paths[self.archive[position]]
        return shown_path(os.fsencode(archive) + b": " + self.names[position])
