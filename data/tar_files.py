"""Members of plain tar archives, read in place: a member is so many bytes from some byte of its archive."""

import os
import tarfile
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from data.base import DatasetError
from data.image_files import PackedNames, is_image_name, shown_path
from data.saved_index import Advance

MAX_OPEN_ARCHIVES = 64
COMPRESSIONS = {b"\x1f\x8b\x08": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}


class Member(NamedTuple):
    """A file inside an archive."""

    name: bytes
    offset: int  # of its content, in bytes from the beginning of the archive
    size: int  # bytes


def read_members(path: Path, advance: Advance = lambda count: None, nested: bool = False) -> Iterator[Member]:
    """Regular files of a plain tar archive, in its order.

    Args:
        path: the archive.
        advance: called with the number of bytes gone on.
        nested: instead of each member that is an archive itself, give its members, as "archive.tar/member".

    Raises:
        DatasetError: it cannot be read, is compressed, cut short or damaged.
    """
    with _opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        head = file.read(tarfile.BLOCKSIZE)
        kind = next((kind for magic, kind in COMPRESSIONS.items() if head.startswith(magic)), "")
        if kind and head[257:262] != b"ustar":  # a member's name may begin like one
            raise DatasetError(f"{path}: is compressed ({kind}); decompress it to read from it in place")
        gone = 0
        for member in _members(path, file, 0, size):
            if nested and member.name.endswith(b".tar"):
                for inner in _members(path, file, member.offset, member.offset + member.size):
                    yield Member(member.name + b"/" + inner.name, inner.offset, inner.size)
            else:
                yield member
            advance(member.offset + member.size - gone)
            gone = member.offset + member.size


def _members(path: Path, file: BinaryIO, begin: int, end: int) -> Iterator[Member]:
    """Those of the archive between two bytes of a file."""
    file.seek(begin)
    try:
        archive = tarfile.open(fileobj=file, mode="r:", errors="surrogateescape")
        while (entry := archive.next()) is not None:
            archive.members.clear()  # they are many
            if entry.offset_data + entry.size > end:
                raise DatasetError(f"{path}: cut short: {entry.name!r} goes on past byte {end} (copy it again)")
            if (entry.islnk() or entry.issym()) and is_image_name(os.fsencode(entry.name)):
                advice = "pack it again with tar --hard-dereference --dereference"
                raise DatasetError(f"{path}: {entry.name!r} is a link, which cannot be read in place ({advice})")
            if entry.isreg() and not entry.issparse():
                yield Member(os.fsencode(entry.name), entry.offset_data, entry.size)
            file.seek(archive.offset)  # the caller may have read elsewhere
    except tarfile.TarError as error:
        raise DatasetError(f"{path}: no tar archive, or damaged ({error}; copy it again)") from error
    # A damaged header, too, ends the archive for the package.
    file.seek(archive.offset)
    if archive.offset + tarfile.BLOCKSIZE > end:
        raise DatasetError(f"{path}: cut short at byte {end}: a tar's last block is missing (copy it again)")
    if any(file.read(tarfile.BLOCKSIZE)):
        raise DatasetError(f"{path}: damaged at byte {archive.offset}: no tar header (copy it again)")


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    try:
        with open(path, "rb") as file:
            yield file
    except OSError as error:
        raise DatasetError(f"{path}: cannot be read: {error.strerror or error}") from error


class OpenArchives:
    """Files read by offset, the last few kept open; a copy in another process opens its own."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = tuple(paths)
        self._descriptors: OrderedDict[int, int] = OrderedDict()

    def read(self, archive: int, offset: int, size: int) -> bytes:
        """Raises OSError, or ValueError where the archive is shorter than that."""
        if archive not in self._descriptors:
            if len(self._descriptors) >= MAX_OPEN_ARCHIVES:
                os.close(self._descriptors.popitem(last=False)[1])
            self._descriptors[archive] = os.open(self.paths[archive], os.O_RDONLY)
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
        archive: which of them each image is in, int32 [N].
        offsets, sizes: bytes, int64 [N].
        names: of the members.
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
