"""Saved contents of a folder of images with captions: read once on a machine, shared by its processes, and used again at the
next start.

The names of a folder, with the size, the inode and the times of each file, stand for its contents: a file that is changed or
replaced has others, even where its time of modification is set back. So a process asks for each file's status, and one of
them reads the files.
"""

import hashlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torchtitan.data.image_files import ImageList
from torchtitan.data.node_cache import NodeCache
from torchtitan.data.saved_listing import MAX_BYTES, SECONDS_SETTLED, cache_folder


@dataclass(frozen=True)
class CaptionedImages:
    """Images of a folder in the order of their names, with captions and sizes.

    Attributes:
        files: the images.
        captions: of each, one line, the trigger word filled in.
        sizes: width and height of each, in pixels, as it is shown.
        digests: SHA-256 of the bytes of each file.
    """

    files: ImageList
    captions: tuple[str, ...]
    sizes: tuple[tuple[int, int], ...]
    digests: tuple[bytes, ...]


def read_once(
    root: bytes, names: list[bytes], reading: tuple[str, ...], read: Callable[[], CaptionedImages]
) -> CaptionedImages:  # fmt: skip
    """Contents of a folder, which one of a machine's processes reads while the others wait for it.

    Args:
        root: the folder.
        names: of all files that are read, images and captions, relative to it.
        reading: what the captions depend on besides.
        read: reads the files.

    Raises:
        OSError: the saved ones cannot be read or written.
        (and the exceptions of `read`)
    """
    try:
        statuses = [os.stat(os.path.join(root, name)) for name in names]
        cache = NodeCache(cache_folder(), MAX_BYTES)
    except OSError:  # no place for it, or a file that cannot be read, which is named when it is
        return read()
    if time.time() - max(max(status.st_mtime, status.st_ctime) for status in statuses) < SECONDS_SETTLED:
        return read()
    marks = [
        (name, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        for name, status in zip(names, statuses, strict=True)
    ]
    described = ("contents 2", os.path.abspath(root), reading, marks)
    key = hashlib.sha256(repr(described).encode()).hexdigest()
    return _contents(root, cache.get(key, lambda: _table(read())))


def _table(images: CaptionedImages) -> Any:
    import pyarrow

    names = [images.files.names[position] for position in range(len(images.files))]
    widths, heights = zip(*images.sizes, strict=True)
    return pyarrow.table({
        "name": pyarrow.array(names, pyarrow.large_binary()),
        "caption": pyarrow.array(images.captions, pyarrow.large_string()),
        "width": pyarrow.array(widths, pyarrow.int64()), "height": pyarrow.array(heights, pyarrow.int64()),
        "sha256": pyarrow.array(images.digests, pyarrow.binary(32)),
    })  # fmt: skip


def _contents(root: bytes, table: Any) -> CaptionedImages:
    columns = table.to_pydict()
    sizes = tuple(zip(columns["width"], columns["height"], strict=True))
    return CaptionedImages(ImageList.of(root, [columns["name"]]), tuple(columns["caption"]), sizes, tuple(columns["sha256"]))
