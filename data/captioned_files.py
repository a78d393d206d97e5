"""Images and captions of a folder, as trainers of adapters lay them out.

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
from functools import partial
from typing import Any

from torchtitan.data.base import DatasetError
from torchtitan.data.captions import MAX_CAPTION_BYTES
from torchtitan.data.image_files import is_image_name, list_files, shown_path
from torchtitan.data.left_out import PICTURES_NOT_READ, ending_of, say_left_out, say_once
from torchtitan.files.regular import read_text
from torchtitan.pictures.number_text import counted

_CAPTION_ENDINGS = (b"txt", b"caption")
_TABLES = (b"metadata.jsonl", b"metadata.csv")
_DOCUMENT = re.compile(rb"(readme|licen[sc]e|copying|copyright|notice|attribution|authors|credits|changelog)(?![a-z])", re.I)
_MASK = re.compile(r"(?:^|(?<=/))masks?/(?=[^/]+$)|-(?:mask|cond)label$")  # of kohya's trainers and ai-toolkit; of OneTrainer
_CONTROLS = re.compile(r"(^|/)_controls/")  # of ai-toolkit

ReadCaption = Callable[[], str | None]


def captioned_images(root: bytes) -> list[tuple[bytes, str, ReadCaption | None]]:
    """Find the images in a folder, of any depth, and their captions.

    Returns:
        name of each image by name, place of its caption, and what reads it (None: there is none).

    Raises:
        DatasetError: an image has two captions, or a caption none or two images.
    """
    names = list_files(root, _is_wanted)
    unread = [name for name in names if ending_of(name) in PICTURES_NOT_READ]
    images = _by_stem(root, filter(is_image_name, names), "images for one caption")
    texts = _by_stem(root, (name for name in names if ending_of(name) in _CAPTION_ENDINGS), "captions for one image")
    pictures = images.keys() | set(map(_stem, unread))
    masks = {
        stem for stem in images.keys() - texts.keys()
        if _CONTROLS.search(stem) or _MASK.search(stem) and _MASK.sub("", stem) in pictures
    }  # fmt: skip
    if images:
        say_left_out(shown_path(root), Counter(ending_of(name).decode() for name in unread))
    if masks:
        say_once(f"{shown_path(root)}: ignoring {counted(len(masks), 'mask')} beside images")
    captions: dict[str, tuple[str, ReadCaption]] = {
        stem: (_shown(root, name), partial(read_text, os.path.join(root, name), MAX_CAPTION_BYTES))
        for stem, name in texts.items() if stem in pictures or not _DOCUMENT.match(os.path.basename(name))
    }  # fmt: skip
    for name in (name for name in names if os.path.basename(name).lower() in _TABLES):
        for place, stem, text in _rows(root, name):
            if stem in captions:
                raise DatasetError(f"{place}: this and {captions[stem][0]} are two captions for one image (remove one)")
            captions[stem] = place, partial(str, text)
    if alone := sorted(captions.keys() - pictures):
        raise DatasetError(f"{captions[alone[0]][0]}: a caption without an image (add the image, or remove the caption)")
    kept = sorted((name for stem, name in images.items() if stem not in masks), key=lambda name: os.path.splitext(name)[0])
    found = [(name, captions.get(_stem(name))) for name in kept]
    return [(name, *given) if given else (name, _shown(root, name), None) for name, given in found]


def _is_wanted(name: bytes) -> bool:
    ending = ending_of(name)
    return is_image_name(name) or ending in _CAPTION_ENDINGS or ending in PICTURES_NOT_READ or name.lower() in _TABLES


def _stem(name: bytes | str) -> str:
    """Name without ending, in one Unicode form."""
    return unicodedata.normalize("NFC", os.path.splitext(os.fsdecode(name))[0])


def _shown(root: bytes, name: bytes) -> str:
    return shown_path(os.path.join(root, name))


def _by_stem(root: bytes, names: Iterable[bytes], kind: str) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for name in names:
        other = found.setdefault(_stem(name), name)
        if other != name:
            shown = shown_path(os.path.basename(name))
            raise DatasetError(f"{_shown(root, other)}: this and {shown} are two {kind} (rename or remove one)")
    return found


def _json_rows(text: str) -> Iterator[Any]:
    for number, line in enumerate(filter(str.strip, text.split("\n")), 1):
        try:
            yield json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"row {number}: {error.msg}, column {error.colno}") from error


def _rows(root: bytes, name: bytes) -> Iterator[tuple[str, str, str]]:
    """Place, stem of the image, and caption of each row of a file of metadata; no row of one that has no captions.

    Raises:
        DatasetError: it cannot be read, or a row names no image or has no text as its caption.
    """
    shown = _shown(root, name)
    try:
        text = read_text(os.path.join(root, name))
        found: Iterable[Any] = _json_rows(text)
        if ending_of(name) == b"csv":
            first, _, _ = text.partition("\n")
            separator = ";" if ";" in first and "," not in first else ","  # some spreadsheets write the former
            found = csv.DictReader(io.StringIO(text, newline=""), delimiter=separator)
        rows = [row if isinstance(row, dict) else {} for row in found]
    except (OSError, ValueError, RecursionError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or error
        raise DatasetError(f"{shown}: cannot be read as metadata of images: {reason}") from error
    if not any("file_name" in row and row.keys() & {"text", "caption"} for row in rows):
        say_once(f"{shown}: not read: captions are in columns file_name and text (or caption)")
        return
    header = ending_of(name) == b"csv"
    for number, row in enumerate(rows, 1 + header):
        file, caption = row.get("file_name"), row.get("text") or row.get("caption") or ""
        if not isinstance(file, str) or not isinstance(caption, str):
            raise DatasetError(f"{shown}: row {number}: needs file_name, and text or caption, as texts")
        path = os.path.normpath(os.path.join(os.fsdecode(os.path.dirname(name)), file))
        yield f"{shown}: row {number}: {shown_path(os.fsencode(file))}", _stem(path), caption
