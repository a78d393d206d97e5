"""Images with a caption each, in one folder: name.png beside name.txt, as squares or in aspect buckets."""

import functools
import hashlib
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
from tqdm import tqdm

from torchtitan.conditions import Unconditional
from torchtitan.data.aspect_buckets import STEP, bucket_of, own_size
from torchtitan.data.base import DatasetError, DatasetInfo, Split
from torchtitan.data.captioned_files import ReadCaption, captioned_images
from torchtitan.data.captions import caption_at
from torchtitan.data.class_folders import existing_folder
from torchtitan.data.image_decoding import decoding_problem, upright_size, with_advice
from torchtitan.data.image_files import (
    ImageList,
    SquareImages,
    SquareImagesConfig,
    check_readable,
    found_instead,
    shown_path,
)
from torchtitan.data.left_out import say_once
from torchtitan.data.online_text import OnlineTextConfig, online_kind
from torchtitan.data.splits import chosen_positions, spread_evenly
from torchtitan.data.trigger_words import PLACEHOLDER, TRIGGER_KEY, filled, has_trigger
from torchtitan.pictures.number_text import counted
from torchtitan.settings import setting

_REPEATED_DEEPER = re.compile(rb"(.+/[1-9]\d{0,2}_[^/]+)/")
_REPEATED = re.compile(rb"([1-9]\d{0,2})_[^/]+/")  # a folder as kohya's trainers repeat it; 2024_summer or 01_front is another

_MOST_NAMED = 10  # of further images that fail
_Read = TypeVar("_Read")


@dataclass(kw_only=True)
class CaptionedFolderConfig(OnlineTextConfig, SquareImagesConfig):
    """`[data]` with name = "captioned_folder"."""

    name: Literal["captioned_folder"] = setting("captioned_folder", "dataset")
    path: str = setting("", "folder of images, each with a caption: name.jpg and name.txt, or a metadata.jsonl", path=True)
    resolutions: list[int] = setting(
        [], "roots of the areas of aspect buckets, as [512, 768, 1024]; default: squares of data.image_size"
    )
    trigger_word: str = setting("", TRIGGER_KEY)
    missing_caption: Literal["refuse", "trigger"] = setting(
        "refuse", "for an image without a caption, or with an empty one: refuse the run, or take the trigger word as its caption"
    )
    # Words about left and right, and letters in the picture, would be wrong in a mirror.
    horizontal_flip: bool = setting(False, "mirror each training image with probability 1/2")
    validation_path: str = setting("", "folder of held-out images, laid out like data.path", path=True)
    validation_fraction: float = setting(
        0.05, "share of data.path held out, spread evenly over its order", ge=0, lt=1,
        applies={"validation_path": ("",)},
    )  # fmt: skip

    def sizes_of(self, width: int, height: int) -> list[tuple[int, int]]:
        """Sizes (width, height) in which an image of that size is seen, none of them larger than it."""
        if self.resolutions:
            found = [bucket_of(width, height, resolution) for resolution in self.resolutions]
            found = found if any(found) else [own_size(width, height, min(self.resolutions))]
            return [size for size in found if size is not None]
        side = self.required_size()
        return [(side, side)] if min(width, height) >= side else []


@dataclass(frozen=True)
class CaptionedImages:
    """Images of a folder in the order of their names, with captions and sizes.

    Attributes:
        captions: of each, one line, the trigger word filled in.
        sizes: width and height of each, in pixels, as it is shown.
        digests: SHA-256 of the bytes of each file.
    """

    files: ImageList
    captions: tuple[str, ...]
    sizes: tuple[tuple[int, int], ...]
    digests: tuple[bytes, ...]


class CaptionedFolder(SquareImages):
    """Colour images with captions, one entry per image and resolution that the image covers without being enlarged.

    Entries are numbered size by size, and within a size by the names of the files. Without `validation_path` image i of
    the folder, in all of its sizes, is held out where floor((i + 1) f) > floor(i f), f = `validation_fraction`.
    """

    Config = CaptionedFolderConfig

    @staticmethod
    def info(config: CaptionedFolderConfig) -> DatasetInfo:
        train = _open(config, "train")
        check_readable(train.files, "data.path")
        if config.validation_path:
            check_readable(_open(config, "validation").files, "data.validation_path")
            has_validation = True
        else:
            has_validation = bool(_held_out(config, train).any())
        shapes = tuple((3, height, width) for width, height in _all_sizes(config))
        buckets = shapes if len(shapes) > 1 else ()
        return DatasetInfo(shapes[-1], online_kind(config) or Unconditional(), has_validation, buckets)

    def __init__(self, config: CaptionedFolderConfig, split: Split) -> None:
        images = _open(config, split)
        chosen = np.arange(len(images.files))
        if not config.validation_path:
            held_out = _held_out(config, images)
            chosen = chosen_positions(held_out if split == "validation" else ~held_out, split, config.validation_fraction)
        if split == "train":
            chosen = np.repeat(chosen, _repeats(images.files)[chosen])
        self._sizes, self._counts_all = _all_sizes(config), split == "validation" or not config.validation_path
        positions, counts = _entries(config, images, chosen, self._sizes)
        self._ends = np.cumsum(counts)
        if len(self._sizes) > 1:
            self.buckets = counts
        self._captions, self.encodes_captions = images.captions, bool(config.text_encoder)
        super().__init__(images.files, positions, np.zeros(len(positions), np.int64), max(self._sizes[-1]), labelled=False)

    def captions(self, indices: np.ndarray) -> list[str]:
        """Captions of images, one line each, with the trigger word."""
        return [self._captions[position] for position in self._positions[indices]]

    def listing_digest(self) -> str:
        """Digest of the listing: names, captions, sizes; not of the pixels, nor of held-out images elsewhere."""
        seen = self._counts_all | (np.diff(self._ends, prepend=0) > 0)
        sizes = tuple(itertools.compress(self._sizes, seen))
        described = (super().listing_digest(), self._captions, sizes, self._ends[seen].tolist())
        return hashlib.sha256(repr(described).encode()).hexdigest()

    def _size_of(self, indices: np.ndarray) -> tuple[int, int]:
        buckets = np.unique(np.searchsorted(self._ends, indices, side="right"))
        if len(buckets) > 1:
            raise DatasetError(f"images of {len(buckets)} sizes in one batch, which is of one bucket")
        return self._sizes[buckets[0]]


def content_digest(config: CaptionedFolderConfig) -> str:
    """Digest of every name, caption and byte of the images of both splits. Raises DatasetError."""
    splits: tuple[Split, ...] = ("train", "validation") if config.validation_path else ("train",)
    found = [_open(config, split) for split in splits]
    described: list[tuple] = [(images.files.names.letters.tobytes(), images.captions, images.digests) for images in found]
    if (repeats := _repeats(found[0].files)).max() > 1:  # others keep the digest that they had
        described.append(tuple(repeats.tolist()))
    return hashlib.sha256(repr(described).encode()).hexdigest()


def _held_out(config: CaptionedFolderConfig, images: CaptionedImages) -> np.ndarray:
    """Which images are held out by a share, bool [N]: none of a size in which no other is trained."""
    held_out = spread_evenly(len(images.files), config.validation_fraction)
    sizes = [set(config.sizes_of(*size)) for size in images.sizes]
    trained = set().union(*itertools.compress(sizes, ~held_out))
    alone = held_out & np.array([not each <= trained for each in sizes])
    if alone.any():
        place = shown_path(images.files.folder)
        say_once(f"{place}: trained, not held out, as the only ones of their size: {counted(int(alone.sum()), 'image')}")
    return held_out & ~alone


def check_held_out_sizes(config: CaptionedFolderConfig) -> None:
    """Check that images of `data.validation_path` are seen in sizes of training. Raises DatasetError: names one that is not."""
    trained = {size for width, height in _open(config, "train").sizes for size in config.sizes_of(width, height)}
    images = _open(config, "validation")
    for position, (width, height) in enumerate(images.sizes):
        if other := set(config.sizes_of(width, height)) - trained:
            shown = "{} x {}".format(*min(other))
            raise DatasetError(
                f"data.validation_path: {images.files.shown(position)}: is seen in {shown}, and no image of training is "
                "(remove it, or add one of that shape to data.path)"
            )


def _check_keys(config: CaptionedFolderConfig) -> None:
    """Check keys that belong together. Raises DatasetError."""
    if config.trigger_word.strip().lower() == "none":
        raise DatasetError(f'data.trigger_word: "{config.trigger_word}" would be the word (none is data.trigger_word = "")')
    if config.missing_caption == "trigger" and not config.trigger_word.split():
        raise DatasetError('data.missing_caption: "trigger" needs data.trigger_word, which replaces missing captions (give it)')
    if config.resolutions and config.image_size is not None:
        text = "is the side of squares, and data.resolutions asks for buckets; give one of them (data.resolutions = [] is none)"
        raise DatasetError(f"data.image_size: {text}")
    if not config.resolutions and config.image_size is None:
        raise DatasetError(
            "data.resolutions: not given; captioned_folder needs resolutions of aspect buckets, as [512, 768, 1024], or "
            "data.image_size for squares"
        )
    if small := [resolution for resolution in config.resolutions if resolution < STEP]:
        raise DatasetError(f"data.resolutions: {small[0]} is below {STEP}, the smallest side of a bucket (give at least {STEP})")
    for resolution in [each for each in config.resolutions if each % STEP]:
        side = resolution // STEP * STEP
        say_once(f"data.resolutions: squares of {resolution} are seen in {side} x {side}: sides are multiples of {STEP}")
    if len(set(config.resolutions)) < len(config.resolutions):
        raise DatasetError(f"data.resolutions: {config.resolutions} names a resolution twice")


def _open(config: CaptionedFolderConfig, split: Split) -> CaptionedImages:
    _check_keys(config)
    key = "validation_path" if split == "validation" and config.validation_path else "path"
    path = getattr(config, key)
    if not path:
        raise DatasetError(f"data.{key}: not given; captioned_folder needs a folder of images and captions")
    images = _read_folder(f"data.{key}", path, config.trigger_word, config.missing_caption)
    place, missed, seen = shown_path(images.files.folder), Counter[int](), set()

    def sizes_of(position: int) -> list[tuple[int, int]]:
        width, height = images.sizes[position]
        sizes = config.sizes_of(width, height)
        if not sizes:
            asked, advice = f"data.image_size = {config.image_size}", "remove it, or ask for a smaller size"
            if config.resolutions:
                asked, advice = f"data.resolutions = {config.resolutions}", f"remove it: a side below {STEP} fits none"
            raise DatasetError(
                f"{images.files.shown(position)}: {width} x {height} pixels cover no size of {asked}, and images are never "
                f"enlarged ({advice})"
            )
        return sizes

    found = _of_each(images.files, sizes_of, range(len(images.sizes)))
    for (width, height), sizes in zip(images.sizes, found, strict=True):
        if larger := [each for each in config.resolutions if bucket_of(width, height, each) is None]:
            missed.update(larger)
            seen.update(sizes)
    if missed:
        shown = ", ".join(f"{width} x {height}" for width, height in sorted(seen)[:3]) + (", ..." if len(seen) > 3 else "")
        of_all = f"of {len(images.sizes):,} cover no bucket of"
        lacking = ", ".join(f"{count:,} {of_all} {each}" for each, count in sorted(missed.items()))
        text = f"images are not enlarged, and {lacking} (data.resolutions); width x height of all sizes of these images: {shown}"
        say_once(f"{place}: {text}")
    if key == "path" and (count := int(_repeats(images.files).sum())) > len(images.sizes):
        text = f"are repeated to {count:,}: folders named N_name repeat theirs N times"
        say_once(f"{place}: {counted(len(images.sizes), 'image')} {text}")
        return images
    deeper = (_REPEATED_DEEPER.match(images.files.names[position]) for position in range(len(images.files)))
    if key == "path" and (first := next(filter(None, deeper), None)):
        say_once(f"{place}: images of {shown_path(first[1])} are not repeated, as that is no folder directly in data.path")
    return images


def _repeats(files: ImageList) -> np.ndarray:
    """Number of times that an epoch shows each image, int64 [N]."""
    found = (_REPEATED.match(files.names[position]) for position in range(len(files)))
    return np.array([int(each[1]) if each else 1 for each in found])


@functools.lru_cache(maxsize=4)  # a run opens the same folder several times
def _read_folder(key: str, path: str, trigger_word: str, missing: str = "refuse") -> CaptionedImages:
    """Captions of a folder and sizes of its images. Raises DatasetError."""
    root = existing_folder(key, path)
    captioned = captioned_images(root)
    if not captioned:
        raise DatasetError(f"{key}: {path!r} has no images in it{found_instead(root)}")

    files = ImageList.of(root, [[name for name, _, _ in captioned]])
    numbers = range(len(files))
    lacking: list[str] = []
    read = functools.partial(_read_caption, trigger_word=trigger_word, missing=missing, lacking=lacking)
    captions = tuple(_of_each(files, lambda number: read(*captioned[number][1:]), numbers))
    shown = tqdm(numbers, "reading the sizes of images", delay=2)
    sizes, digests = zip(*_of_each(files, functools.partial(_read_size_and_digest, files), shown), strict=True)
    if missing == "trigger" and (alone := captions.count(filled("[trigger]", trigger_word))):
        say_once(f"{shown_path(root)}: the trigger word alone is the caption of {alone:,} of {len(captions):,} images")
    if 0 < len(lacking) < len(captions):  # perhaps pictures of the subject's class
        advice = f"{lacking[0]} for one; to keep some without it, write the word in the others and leave data.trigger_word out"
        some = f"{len(lacking):,} of {len(captions):,} captions"
        say_once(f"{shown_path(root)}: the trigger word is put in front of {some} ({advice})")
    return CaptionedImages(files, captions, sizes, digests)


def _of_each(files: ImageList, read: Callable[[int], _Read], numbers: Iterable[int]) -> list[_Read]:
    """What is read of each image. Raises DatasetError: that of the first that fails, with the names of all others."""
    found, failed = [], {}
    for number in numbers:
        try:
            found.append(read(number))
        except DatasetError as error:
            failed[number] = error
    if failed:
        (_, first), *others = failed.items()
        names = ", ".join(shown_path(files.names[number]) for number, _ in others[:_MOST_NAMED])
        more = f"; {len(others)} more fail: {names}{', ...' if len(others) > _MOST_NAMED else ''}" if others else ""
        raise DatasetError(f"{first}{more}") from first
    return found


def _read_caption(place: str, read: ReadCaption | None, trigger_word: str, missing: str, lacking: list[str]) -> str:
    """Caption of an image; its name goes to `lacking` where the trigger word is put in front. Raises DatasetError."""

    def text() -> str:
        found = read() if read else None
        if found and found.split():
            if not (PLACEHOLDER.search(found) or has_trigger(found, trigger_word)):
                lacking.append(Path(place).name)
            return found
        if missing == "trigger":
            return "[trigger]"
        missing_file = f"an image without a caption (add {Path(place).stem}.txt or its row in metadata.csv, remove the image"
        problem = "the caption is empty (write it" if read else missing_file
        raise ValueError(problem + (', or set data.missing_caption = "trigger")' if trigger_word.split() else ")"))

    return caption_at(place, text, trigger_word)


def _read_size_and_digest(files: ImageList, position: int) -> tuple[tuple[int, int], bytes]:
    try:
        content = files.content(position)
        return upright_size(content), hashlib.sha256(content).digest()
    except Exception as error:  # a damaged file fails in any way, and its bucket is not known
        problem = with_advice(decoding_problem(error), "mend or remove it")
        raise DatasetError(f"{files.shown(position)}: {problem}") from error


def _all_sizes(config: CaptionedFolderConfig) -> tuple[tuple[int, int], ...]:
    """Different sizes in which images of either split are seen, ascending by area."""
    splits: tuple[Split, ...] = ("train", "validation") if config.validation_path else ("train",)
    shown = {size for split in splits for size in _open(config, split).sizes}
    seen = {size for width, height in shown for size in config.sizes_of(width, height)}
    return tuple(sorted(seen, key=lambda size: (size[0] * size[1], size)))


def _entries(
    config: CaptionedFolderConfig, images: CaptionedImages, chosen: np.ndarray, sizes: tuple[tuple[int, int], ...]
) -> tuple[np.ndarray, np.ndarray]:
    """Entries of the chosen images: position of each, int64 [N], size by size, and the number of each size, int64 [K].

    Their order does not depend on the other split.
    """
    number = {size: place for place, size in enumerate(sizes)}
    found = sorted(
        (number[size], position) for position in chosen.tolist() for size in config.sizes_of(*images.sizes[position])
    )
    buckets, positions = np.array(found, np.int64).T
    return positions.copy(), np.bincount(buckets, minlength=len(sizes))
