"""Members of plain tar archives, read in place by offset and size."""

import os
import tarfile
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from tqdm import tqdm

from torchtitan.data.base import DatasetError
from torchtitan.data.image_decoding import MAX_FILE_BYTES
from torchtitan.data.image_files import PackedNames, shown_path
from torchtitan.files.regular import check_regular, open_regular

MAX_OPEN_ARCHIVES = 64
COMPRESSIONS = {b"\x1f\x8b\x08": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}


class Member(NamedTuple):
    """Member: a file inside an archive."""

    name: bytes
    offset: int  # of its content, in bytes from the beginning of the archive
    size: int  # bytes


def read_members(path: Path, nested: bool = False) -> Iterator[Member]:
    """Read the regular files of a plain tar archive, in its order.

    Args:
        nested: instead of each member that is an archive itself, give its members, as "archive.tar/member".

    Raises:
        DatasetError: it cannot be read, is compressed, cut short or damaged, or holds a link or a sparse file.
    """
    try:
        with open_regular(path) as file:
            end, head = os.fstat(file.fileno()).st_size, file.read(tarfile.BLOCKSIZE)
            kind = next((kind for magic, kind in COMPRESSIONS.items() if head.startswith(magic)), "")
            if kind and head[257:262] != b"ustar":  # a member's name may begin like one
                raise DatasetError(f"{path}: is compressed ({kind}); decompress it to read from it in place")
            for member in tqdm(_members(path, file, 0, end), path.name, unit=" members", delay=2, leave=False):
                if nested and member.name.endswith(b".tar"):
                    for inner in _members(path, file, member.offset, member.offset + member.size):
                        yield Member(member.name + b"/" + inner.name, inner.offset, inner.size)
                else:
                    yield member
    except OSError as error:
        raise DatasetError(f"{path}: cannot be read: {error.strerror or error}") from error


def _members(path: Path, file: BinaryIO, begin: int, end: int) -> Iterator[Member]:
    """Give the regular files of the archive between two bytes. Raises DatasetError, OSError."""
    try:
        file.seek(begin)
        archive = tarfile.TarFile(fileobj=file, encoding="utf-8", errors="surrogateescape")
        while (entry := archive.next()) is not None:
            archive.members.clear()  # type: ignore[attr-defined]  # or the headers of all members stay in memory
            name = entry.name.encode("utf-8", "surrogateescape")
            if entry.issym() or entry.islnk() or entry.issparse() or entry.type == tarfile.GNUTYPE_SPARSE:
                kind = "a link" if entry.issym() or entry.islnk() else "a sparse file"
                advice = "pack it again with tar --hard-dereference --dereference, without --sparse"
                raise DatasetError(f"{path}: {shown_path(name)!r} is {kind}, which cannot be read in place ({advice})")
            if entry.isreg():
                if not 0 <= entry.size <= end - entry.offset_data:
                    raise DatasetError(f"{path}: cut short: {shown_path(name)!r} extends past byte {end} (copy it again)")
                yield Member(name, entry.offset_data, entry.size)
        # The library ends at a damaged header as at the last one, which is a block of zeros.
        block = os.pread(file.fileno(), tarfile.BLOCKSIZE, archive.offset)
        if any(block) or len(block) < tarfile.BLOCKSIZE or archive.offset + tarfile.BLOCKSIZE > end:
            raise DatasetError(f"{path}: damaged or cut short at byte {archive.offset}: no tar header (copy it again)")
    except (tarfile.TarError, ValueError, OverflowError) as error:
        raise DatasetError(f"{path}: no tar archive, or damaged or cut short: {error} (copy it again)") from error


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
    """Images inside archives; archive: number of each one's, int32 [N]; offsets, sizes: bytes, int64 [N]."""

    archives: OpenArchives
    archive: np.ndarray
    offsets: np.ndarray
    sizes: np.ndarray
    names: PackedNames

    def __len__(self) -> int:
        return len(self.archive)

    def content(self, position: int) -> bytes:
        return self.archives.read(int(self.archive[position]), int(self.offsets[position]), int(self.sizes[position]))

    def shown(self, position: int) -> str:
        archive = self.archives.paths[self.archive[position]]
        return shown_path(os.fsencode(archive) + b": " + self.names[position])
