"""Files of a folder of captioned images, as trainers of adapters lay them out: images, captions, and what is neither.

A caption is in name.txt or name.caption beside its image, or in the metadata.jsonl or metadata.csv of its folder or of one
above, as Hugging Face's imagefolder has them: `file_name` relative to that file, and `text` or `caption`.
"""

import csv
import io
import json
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torchtitan.data.base import DatasetError
from torchtitan.data.captions import MAX_CAPTION_BYTES
from torchtitan.data.image_files import is_image_name, list_files, shown_path
from torchtitan.data.left_out import PICTURES_NOT_READ, ending_of
from torchtitan.files.regular import read_text

_CAPTION_ENDINGS = (b"txt", b"caption")
_TABLES = (b"metadata.jsonl", b"metadata.csv")
_DOCUMENT = re.compile(rb"(readme|licen[sc]e|copying|copyright|notice|attribution|authors|credits|changelog)(?![a-z])", re.I)
_MASK = re.compile(r"(.+)-(?:mask|cond)label")  # of OneTrainer
_MASK_FOLDER = re.compile(r"(|.*/)masks?/([^/]+)")  # of kohya's trainers and ai-toolkit
_CONTROLS = "/_controls/"  # of ai-toolkit
_REPEATED = re.compile(rb"(([1-9]\d{0,2})_[^/]+)/")  # kohya's; 2024_summer or 01_front is another's folder

ReadCaption = Callable[[], str | None]


@dataclass(frozen=True)
class CaptionedFiles:
    """Files of a folder, relative to it, by stem: the path without ending, in one Unicode form.

    Attributes:
        names: all that decide the images and captions.
        images, texts: their names.
        tables: files of metadata.
        unread: stems of pictures of endings that are not read.
        left_out: number of these by ending.
        masks: number of pictures that are masks of others.
    """

    root: bytes
    names: list[bytes]
    images: dict[str, bytes]
    texts: dict[str, bytes]
    tables: list[bytes]
    unread: set[str]
    left_out: Counter[bytes]
    masks: int = 0

    def shown(self, name: bytes) -> str:
        return shown_path(os.path.join(self.root, name))

    def captions(self) -> Iterator[tuple[bytes, str, ReadCaption | None]]:
        """Images in the order of their names, each with the place of its caption and what reads it; None: it has none.

        Raises:
            DatasetError: a caption has no image, or an image has two.
        """
        found: dict[str, tuple[str, ReadCaption]] = {}
        for stem, name in sorted(self.texts.items()):
            path = os.path.join(self.root, name)
            found[stem] = (self.shown(name), lambda path=path: read_text(path, MAX_CAPTION_BYTES))
        for name in self.tables:
            for place, stem, text in _rows(self.root, name):
                if stem in found:
                    raise DatasetError(f"{place}: this and {found[stem][0]} are two captions for one image (remove one)")
                found[stem] = (place, lambda text=text: text)
        for stem, (place, _) in found.items():
            if stem not in self.images and stem not in self.unread:
                kind = "file" if stem in self.texts else "line"
                raise DatasetError(f"{place}: a caption without an image (add the image, or remove the {kind})")
        for stem, name in sorted(self.images.items(), key=lambda item: os.path.splitext(item[1])[0]):
            yield name, *found.get(stem, (self.shown(name), None))


def find_files(root: bytes) -> CaptionedFiles:
    """Find the images and captions in a folder of any depth. Raises DatasetError: two images, or captions, of one stem."""
    names = list_files(root, _is_wanted)
    images = _by_stem(root, filter(is_image_name, names), "images for one caption")
    texts = _by_stem(root, (name for name in names if ending_of(name) in _CAPTION_ENDINGS), "captions for one image")
    pictures = [name for name in names if ending_of(name) in PICTURES_NOT_READ]
    unread = set(map(_stem, pictures))
    pairs = images.keys() | unread
    masks = {stem for stem in images.keys() - texts.keys() if _masked(stem) in pairs or _CONTROLS in f"/{stem}"}
    texts = {
        stem: name for stem, name in texts.items()
        if stem in images or stem in unread or not _DOCUMENT.match(os.path.basename(name))
    }  # fmt: skip
    return CaptionedFiles(
        root, names, {stem: name for stem, name in images.items() if stem not in masks}, texts,
        [name for name in names if os.path.basename(name).lower() in _TABLES], unread, Counter(map(ending_of, pictures)),
        len(masks),
    )  # fmt: skip


def repeats_of(name: bytes) -> tuple[bytes, int]:
    """Folder of an image that kohya's trainers repeat, and how many times an epoch: 10_dog/1.jpg -> 10_dog, 10."""
    found = _REPEATED.match(name)
    return (found[1], int(found[2])) if found else (b"", 1)


def _is_wanted(name: bytes) -> bool:
    ending = ending_of(name)
    return is_image_name(name) or ending in _CAPTION_ENDINGS or ending in PICTURES_NOT_READ or name.lower() in _TABLES


def _stem(name: bytes | str) -> str:
    return unicodedata.normalize("NFC", os.path.splitext(os.fsdecode(name))[0])


def _masked(stem: str) -> str | None:
    """Stem of the picture that another would be the mask of."""
    if found := _MASK.fullmatch(stem):
        return found[1]
    found = _MASK_FOLDER.fullmatch(stem)
    return found[1] + found[2] if found else None


def _by_stem(root: bytes, names: Iterable[bytes], kind: str) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for name in names:
        other = found.setdefault(_stem(name), name)
        if other != name:
            first, second = shown_path(os.path.join(root, other)), shown_path(os.path.basename(name))
            raise DatasetError(f"{first}: this and {second} are two {kind} (rename or remove one)")
    return found


def _rows(root: bytes, name: bytes) -> Iterator[tuple[str, str, str | None]]:
    """Place, stem of the image, and caption of each row of a file of metadata; none of one that has no captions.

    Raises:
        DatasetError: it cannot be read, or a row names no image or has no text as its caption.
    """
    shown = shown_path(os.path.join(root, name))
    try:
        text = read_text(os.path.join(root, name))
        rows = list(_csv_rows(text) if ending_of(name) == b"csv" else _json_rows(text))
    except (OSError, ValueError, RecursionError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or error
        raise DatasetError(f"{shown}: cannot be read as metadata of images: {reason}") from error
    if not any("file_name" in row and row.keys() & {"text", "caption"} for _, row in rows):
        return
    for number, row in rows:
        place = f"{shown}: line {number}"
        file, caption = row.get("file_name"), row.get("text") or row.get("caption")
        if not isinstance(file, str) or not isinstance(caption, str | None):
            raise DatasetError(f"{place}: needs file_name, and text or caption, as texts")
        yield place, _stem(os.path.normpath(os.path.join(os.fsdecode(os.path.dirname(name)), file))), caption


def _json_rows(text: str) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                row = json.loads(line)
            except ValueError:
                row = None
            if not isinstance(row, dict):
                raise ValueError(f"line {number} is no JSON object")
            yield number, row


def _csv_rows(text: str) -> Iterator[tuple[int, dict[str, Any]]]:
    reader = csv.DictReader(io.StringIO(text, newline=""))
    for row in reader:
        yield reader.line_num, row
