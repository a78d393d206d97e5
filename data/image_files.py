"""Encoded images in any kind of store: their names, their places, and batches of them as squares."""

import hashlib
import heapq
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import numpy as np
import torch

from torchtitan.data.base import Batch, DataConfig, Dataset, DatasetError, UnreadableImage
from torchtitan.data.image_decoding import MAX_FILE_BYTES, decode_cropped, decoding_problem
from torchtitan.data.left_out import PICTURES_NOT_READ, ending_of, say_left_out, say_once
from torchtitan.data.online_text import with_captions
from torchtitan.files.regular import UnsuitableFile, read_regular, user_path
from torchtitan.pictures.number_text import counted
from torchtitan.settings import setting
from torchtitan.terminal import printable

SUFFIXES = frozenset((b"jpg", b"jpeg", b"jfif", b"png", b"webp", b"bmp", b"gif", b"tif", b"tiff", b"ppm", b"pgm"))
NUM_PROBES = 16
_MOST_ENDINGS = 3  # in a message


@dataclass(kw_only=True)
class SquareImagesConfig(DataConfig):
    """Keys of `[data]` of every dataset that cuts images to squares of a given size."""

    image_size: int | None = setting(None, "side, in pixels, of the squares cut from images", ge=1)
    horizontal_flip: bool = setting(True, "mirror each training image with probability 1/2")
    max_corrupt_share: float = setting(
        0.2, "stop when more than this share of the images read cannot be decoded", ge=0, le=1, trajectory=False
    )

    def required_size(self) -> int:
        """Required side in pixels. Raises DatasetError where the key was not given."""
        if self.image_size is None:
            raise DatasetError(f"data.image_size: not given; {self.name} needs the side of its square images in pixels")
        return self.image_size


class ImageSource(Protocol):
    """Source of encoded images by position, in any kind of store."""

    @property
    def names(self) -> "PackedNames | None":
        return None

    def __len__(self) -> int: ...

    def content(self, position: int) -> bytes:
        """The image file's bytes. Raises DatasetError where the whole store fails, and the run must end; any other
        exception means that this image alone cannot be read."""

    def shown(self, position: int) -> str:
        """Name of an image in messages: a path, or archive and member; one line."""


class LabelledSource(ImageSource, Protocol):
    """Images that are read together with their labels."""

    def label(self, position: int) -> int:
        """Class of an image. Raises DatasetError."""


@dataclass(frozen=True)
class PackedNames:
    """Packed names, end to end in one array, so that a million of them cost little memory in any process.

    Attributes:
        letters: uint8.
        offsets: begin of each name, int64 [N + 1].
    """

    letters: np.ndarray
    offsets: np.ndarray

    @staticmethod
    def of(names: list[bytes]) -> "PackedNames":
        offsets = np.cumsum([0] + [len(name) for name in names], dtype=np.int64)
        return PackedNames(np.frombuffer(b"".join(names), np.uint8), offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, position: int) -> bytes:
        return self.letters[self.offsets[position] : self.offsets[position + 1]].tobytes()


@dataclass(frozen=True)
class ImageList:
    """Files relative to a folder; classes: of each, in order of the class folders, int32 [N]."""

    folder: bytes
    names: PackedNames
    classes: np.ndarray

    @staticmethod
    def of(folder: bytes, names_by_class: list[list[bytes]]) -> "ImageList":
        """Join the classes' names, in the order given."""
        names = [name for class_names in names_by_class for name in class_names]
        counts = [len(class_names) for class_names in names_by_class]
        classes = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        return ImageList(folder, PackedNames.of(names), classes)

    def __len__(self) -> int:
        return len(self.classes)

    def path(self, position: int) -> bytes:
        return os.path.join(self.folder, self.names[position])

    def content(self, position: int) -> bytes:
        return read_regular(self.path(position), MAX_FILE_BYTES)

    def shown(self, position: int) -> str:
        return shown_path(self.path(position))


class SquareImages(Dataset):
    """Squares of a part of a source; encodes_captions: batches hold captions' letters, encoded in training."""

    encodes_captions = False

    def __init__(
        self, source: ImageSource, positions: np.ndarray, labels: np.ndarray | None, image_size: int, labelled: bool = True
    ) -> None:
        """
        Args:
            positions: in the source, int64 [N].
            labels: one per position, int64 [N]; None where only a LabelledSource knows them.
            labelled: whether labels are classes; false: every one is 0, and no image has a class.
        """
        self._source = source
        self._positions = positions
        self._labels = labels
        self._image_size = image_size
        self._labelled = labelled

    def __len__(self) -> int:
        return len(self._positions)

    def listing_digest(self) -> str:
        """Digest of the listing: image positions, names where they have any, and labels; not the content."""
        names = self._source.names
        parts = [self._positions] if names is None else [self._positions, names.offsets, names.letters]
        parts += [] if self._labels is None else [self._labels]
        digest = hashlib.sha256()
        for part in parts:
            digest.update(f"{part.dtype.str} {len(part)} ".encode() + np.ascontiguousarray(part).tobytes())
        return digest.hexdigest()

    def _label_of(self, position: int, index: int) -> int:
        if self._labels is not None:
            return self._labels[index]
        return cast(LabelledSource, self._source).label(position)

    def _size_of(self, indices: np.ndarray) -> tuple[int, int]:
        """Width and height of the images of a batch."""
        return self._image_size, self._image_size

    def fetch(self, indices: np.ndarray) -> Batch:
        width, height = self._size_of(indices)
        images = np.empty((len(indices), height, width, 3), np.uint8)
        labels = np.empty(len(indices), np.int64)
        for slot, index in enumerate(indices):
            position = int(self._positions[index])
            try:
                images[slot] = decode_cropped(self._source.content(position), width, height)
                labels[slot] = self._label_of(position, index)
            except DatasetError:  # not of this image alone
                raise
            except Exception as error:  # a damaged file fails in any way
                shown = self._source.shown(position)
                raise UnreadableImage(int(index), shown, decoding_problem(error), not _may_pass(error)) from error
        pixels = torch.from_numpy(images).permute(0, 3, 1, 2)  # [B, 3, H, W]
        pixels = pixels.to(torch.float32, memory_format=torch.contiguous_format) / 127.5 - 1
        if self.encodes_captions:
            return with_captions({"images": pixels}, self.captions(indices))
        return {"images": pixels} | ({"class": torch.from_numpy(labels)} if self._labelled else {})


def list_images(root: bytes, folders: Sequence[bytes] = (b"",)) -> ImageList:
    """List the files with an image's ending in folders of `root` (b"": itself), a class each, as `list_files`.

    Other pictures are reported as left out. Raises OSError.
    """
    left_out: Counter[str] = Counter()
    names_by_class = [
        list_files(os.path.join(root, folder), is_image_name, folder + b"/" if folder else b"", left_out) for folder in folders
    ]
    files = ImageList.of(root, names_by_class)
    if len(files):
        say_left_out(shown_path(root), left_out)
    return files


def list_files(
    folder: bytes, wanted: Callable[[bytes], bool], prefix: bytes = b"", left_out: Counter[str] | None = None
) -> list[bytes]:
    """List the files with wanted names, in folders of any depth, sorted by name as bytes; of a linked folder, once.

    Names that begin with a dot are left out. Files are listed by their names, and not opened.

    Args:
        wanted: whether a file of this name, without its folder, is listed.
        left_out: counts by ending, to which those of the pictures not wanted are added.
    """
    found, pending = [], [(folder, prefix)]
    links: list[tuple[bytes, bytes]] = []
    dead: list[bytes] = []
    entered: set[bytes] = set()
    while pending or links:
        if not pending:  # links last and by name, so that a folder has the same name on every disk
            name, path = heapq.heappop(links)
            pending.append((path, name))
        inside, before = pending.pop()
        if (real := os.path.realpath(inside)) in entered:
            continue  # a link may lead back to where it is
        entered.add(real)
        with os.scandir(inside) as entries:
            for entry in entries:
                name = entry.name
                if name.startswith(b"."):
                    continue
                if wanted(name):
                    found.append(before + name)
                elif entry.is_dir(follow_symlinks=False):
                    pending.append((entry.path, before + name + b"/"))
                elif entry.is_symlink() and os.path.isdir(entry.path):
                    heapq.heappush(links, (before + name + b"/", entry.path))
                elif entry.is_symlink() and not os.path.exists(entry.path):
                    dead.append(before + name)
                elif left_out is not None and (ending := ending_of(name)) in PICTURES_NOT_READ:
                    left_out[ending.decode()] += 1
    if dead:
        text = f"leaving out {counted(len(dead), 'link')} that cannot be followed, first of all {shown_path(min(dead))}"
        say_once(f"{shown_path(folder)}: {text}")
    return sorted(found)


def is_image_name(name: bytes) -> bool:
    """Check whether a file's name has an image's ending, in either case."""
    return ending_of(name) in SUFFIXES


def found_instead(folder: bytes) -> str:
    """Say which files a folder without images has, by their endings: " (found 3 .heic, not read: convert to jpg)"."""
    counts: Counter[bytes] = Counter()
    for _, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(b".")]
        counts.update(ending_of(name) for name in names if not name.startswith(b".") and b"." in name)
    known = [(ending, count) for ending, count in counts.most_common() if ending.isalnum() and len(ending) <= 8]
    if not known:
        return ""
    found = ", ".join(f"{count:,} .{ending.decode()}" for ending, count in known[:_MOST_ENDINGS])
    pictures = any(ending in PICTURES_NOT_READ for ending, _ in known[:_MOST_ENDINGS])
    return f" (found {found}{', not read: convert to jpg' if pictures else ''})"


def own_pictures_advice(path: str) -> str:
    """Advice for a folder with images in it, or in its folders, where something else is expected; "" for other paths."""
    try:
        root = os.fsencode(user_path(path))
        places = [root, *(os.path.join(root, name) for name in list_folders(root))]
        has_images = any(is_image_name(entry.name) for place in places for entry in os.scandir(place))
    except (OSError, ValueError):
        return ""
    return "its pictures train with train_configs/my_images.toml --data.path FOLDER" if has_images else ""


def list_folders(folder: bytes) -> list[bytes]:
    """List the folders in a folder, sorted as bytes; links to folders count, names with a leading dot do not."""
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if not entry.name.startswith(b".") and entry.is_dir())


def check_readable(source: ImageSource, key: str) -> None:
    """Decode a few images, evenly spread over the source, until one succeeds. Raises DatasetError: none does."""
    probes = np.unique(np.linspace(0, len(source) - 1, NUM_PROBES).astype(np.int64))
    first = None
    for position in probes.tolist():
        try:
            decode_cropped(source.content(position), 8, 8)
            return
        except DatasetError:
            raise
        except Exception as error:  # noqa: BLE001 (decoders raise what they like; every probe is tried)
            first = first or f"{source.shown(position)}: {decoding_problem(error)}"
    raise DatasetError(f"{key}: none of {len(probes)} of its {len(source)} images can be read; the first is {first}")


def shown_path(path: bytes) -> str:
    """Show a path as one printable line, whatever bytes it has."""
    return printable(path.decode("utf-8", "backslashreplace").replace("\n", "\\n"))


def shown_names(names: Iterable[bytes]) -> tuple[str, ...]:
    """Show many names, as `shown_path`."""
    return tuple(shown_path(name) for name in names)


def _may_pass(error: Exception) -> bool:
    """Check whether the failure to read or decode may be temporary; the decoder's own errors have no number."""
    if isinstance(error, UnsuitableFile):
        return False
    return isinstance(error, MemoryError) or isinstance(error, OSError) and error.errno is not None
