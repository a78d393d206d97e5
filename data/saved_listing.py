"""Saved listings of folders of images: made once on a machine, shared by its processes, and used again at the next start.

A folder's time of change moves when a name in it comes or goes. A listing holds as long as the times of all folders that
were listed are the same: to know that takes one call for each folder, not for each file. The names are mapped from a file
in the machine's temporary folder (TMPDIR), so that its processes have them in memory once.
"""

import hashlib
import json
import os
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from torchtitan.data.image_files import ImageList, PackedNames, is_image_name, list_files, shown_path
from torchtitan.data.left_out import say_left_out
from torchtitan.data.node_cache import NodeCache
from torchtitan.files.durable import make_folder

MAX_BYTES = 4 << 30  # of all listings and contents; 100 million names of 30 letters
SECONDS_SETTLED = 60.0  # a change soon after another may not move the time; the file system's clock may be another

_FOLDERS = b"folders"  # of a table's metadata: [path, mark] of each folder that was listed
_LEFT_OUT = b"left out"  # number of pictures by ending


def list_images_of_folders(root: bytes, folders: list[bytes]) -> ImageList:
    """List the images in folders of any depth, each folder's sorted by name as bytes; others are reported as left out.

    Args:
        root: absolute or relative to the working folder.
        folders: names in it, in the order of their classes; b"" for the root itself.

    Raises:
        OSError: a folder cannot be read.
    """
    if time.time() - _newest(root, folders) < SECONDS_SETTLED:
        return _image_list(root, _listed(root, folders))
    try:
        cache = NodeCache(cache_folder(), MAX_BYTES)
    except OSError:
        return _image_list(root, _listed(root, folders))
    key = hashlib.sha256(b"\0".join([os.path.abspath(root), *folders])).hexdigest()
    return _image_list(root, cache.get(key, lambda: _listed(root, folders), _is_current))


def cache_folder() -> Path:
    """Folder of this user's listings and contents on this machine. Raises OSError: it cannot be made, or is another user's."""
    folder = Path(tempfile.gettempdir()) / f"torchtitan-{os.getuid()}" / "listings"
    make_folder(folder.parent)
    status = folder.parent.lstat()
    if folder.parent.is_symlink() or status.st_uid != os.getuid():
        raise PermissionError(f"{folder.parent}: is another user's")
    folder.parent.chmod(0o700)
    return folder


def _listed(root: bytes, folders: list[bytes]) -> Any:
    """List the folders now: a pyarrow Table of names and classes."""
    import pyarrow

    marks: list[tuple[str, list[int]]] = []
    names: list[bytes] = []
    left_out: Counter[str] = Counter()
    counts = []

    def visit(path: bytes) -> None:  # before it is read: what comes meanwhile makes the listing old
        marks.append((os.fsdecode(os.path.abspath(path)), _mark(path)))

    visit(root)
    for folder in folders:
        found = list_files(os.path.join(root, folder), is_image_name, folder + b"/" if folder else b"", visit, left_out)
        names += found
        counts.append(len(found))
    classes = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    table = pyarrow.table({"name": pyarrow.array(names, pyarrow.large_binary()), "class": classes})
    return table.replace_schema_metadata({_FOLDERS: json.dumps(marks), _LEFT_OUT: json.dumps(left_out)})


def _image_list(root: bytes, table: Any) -> ImageList:
    names = table["name"].combine_chunks()
    array = names.chunk(0) if hasattr(names, "chunks") else names
    _, offsets, letters = array.buffers()
    places = np.frombuffer(offsets, np.int64)[: len(array) + 1]
    if len(array):
        say_left_out(shown_path(root), json.loads(table.schema.metadata[_LEFT_OUT]))
    packed = PackedNames(np.frombuffer(letters, np.uint8) if letters else np.empty(0, np.uint8), places)
    return ImageList(root, packed, table["class"].to_numpy())


def _is_current(table: Any) -> bool:
    """Check whether no folder of a listing has changed since, or shortly before."""
    try:
        marks = json.loads(table.schema.metadata[_FOLDERS])
        return _LEFT_OUT in table.schema.metadata and all(_mark(os.fsencode(path)) == mark for path, mark in marks)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _mark(folder: bytes) -> list[int]:
    status = os.stat(folder)
    return [status.st_dev, status.st_ino, status.st_mtime_ns]


def _newest(root: bytes, folders: list[bytes]) -> float:
    return max(os.stat(path).st_mtime for path in (root, *(os.path.join(root, folder) for folder in folders)))
