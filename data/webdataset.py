"""Tar shards in WebDataset's format, read in place: files of one key are a sample, with random access."""

import codecs
import dataclasses
import glob
import os
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal, cast

import numpy as np
from tqdm import tqdm

from torchtitan.conditions import Classes, Unconditional
from torchtitan.data.base import DatasetError, DatasetInfo, Split
from torchtitan.data.captions import CaptionedSource, captions_of
from torchtitan.data.class_folders import read_classes
from torchtitan.data.derived_classes import num_classes_of
from torchtitan.data.image_files import SUFFIXES, PackedNames, SquareImages, SquareImagesConfig, check_readable
from torchtitan.data.left_out import PICTURES_NOT_READ, say_left_out
from torchtitan.data.online_text import OnlineTextConfig, online_kind
from torchtitan.data.splits import split_positions, spread_evenly
from torchtitan.data.tar_files import Member, OpenArchives, TarImages, read_members
from torchtitan.data.trigger_words import PLACEHOLDER, TRIGGER_KEY
from torchtitan.files.regular import open_regular
from torchtitan.settings import setting

PROBLEMS = (
    "",
    "the sample has no image (pack the shard again without it)",
    "the sample has several images",
    "the sample has no label (data.labels = false trains without)",
    "the sample's label is no whole number from 0 to 999999 (write numbers, which data.classes_file names, or set data.labels = "
    "false)",
    "the sample has no caption (pack the shard again with its .txt, or without the image)",
    "the caption is empty (pack the shard again with a text, or without the image)",
    "the caption is not UTF-8 (pack the shard again)",
)
NO_IMAGE, SEVERAL_IMAGES, NO_LABEL, BAD_LABEL = 1, 2, 3, 4  # places in PROBLEMS
NO_CAPTION, EMPTY_CAPTION, NOT_UTF8 = 5, 6, 7


@dataclass(kw_only=True)
class WebDatasetConfig(OnlineTextConfig, SquareImagesConfig):
    """`[data]` with name = "webdataset"."""

    name: Literal["webdataset"] = setting("webdataset", "dataset")
    path: str = setting("", "tar shards: a folder of them, a pattern with * or ?, or names as train-{000..127}.tar", path=True)
    classes_file: str = setting(
        "", "text file, one 'id name' a line in the order of labels; default: no names, labels up to the largest found",
        applies={"captions": (False,)}, path=True,
    )  # fmt: skip
    captions: bool = setting(False, "read the caption in each sample's .txt instead of a label")
    trigger_word: str = setting("", TRIGGER_KEY, applies={"captions": (True,)})
    validation_path: str = setting("", "shards of held-out images, in the form of data.path", path=True)
    validation_fraction: float = setting(
        0.05, "share of data.path held out, spread evenly over its order", ge=0, lt=1,
        applies={"validation_path": ("",)},
    )  # fmt: skip


@dataclass(frozen=True)
class Samples:
    """Samples of all shards in their order; a sample that lacks something is one that cannot be read.

    Attributes:
        images: the image of each; names are keys.
        labels: int64 [N], 0 where there is none.
        problems: number in PROBLEMS, uint8 [N].
        texts: offset and size of each caption in its image's archive, and whether it has "[trigger]", int64 [N, 3]; None
            where labels are read.
    """

    images: TarImages
    labels: np.ndarray
    problems: np.ndarray
    texts: np.ndarray | None = None
    names: PackedNames | None = None  # keys are not listed

    def __len__(self) -> int:
        return len(self.labels)

    def content(self, position: int) -> bytes:
        if self.problems[position]:
            raise ValueError(PROBLEMS[self.problems[position]])
        return self.images.content(position)

    def text(self, position: int) -> str | None:
        """Caption of a sample as it is stored. Raises OSError, or ValueError where the shard has changed."""
        if self.texts is None:
            return None
        offset, size, _ = self.texts[position].tolist()
        return self.images.archives.read(int(self.images.archive[position]), offset, size).decode("utf-8-sig")

    def shown(self, position: int) -> str:
        return self.images.shown(position)


class WebDataset(SquareImages):
    """Colour images [3, S, S] with the labels or captions in the shards.

    Without `validation_path` sample i of data.path is held out where floor((i + 1) f) > floor(i f),
    f = `validation_fraction`.
    """

    Config = WebDatasetConfig

    @staticmethod
    def info(config: WebDatasetConfig) -> DatasetInfo:
        size = config.required_size()
        train = _open(config, "train")
        check_readable(train, "data.path")
        if config.validation_path:
            held_out = _open(config, "validation")
            check_readable(held_out, "data.validation_path")
            trained, other = (set(map(os.path.realpath, each.images.archives.paths)) for each in (train, held_out))
            if common := trained & other:
                text = f"{min(common)} is a shard of data.path too, which would be trained on"
                raise DatasetError(f"data.validation_path: {text} (name it in one of them, or leave this key out)")
        has_validation = bool(config.validation_path or spread_evenly(len(train), config.validation_fraction).any())
        if config.captions:
            return DatasetInfo((3, size, size), online_kind(config) or Unconditional(), has_validation)
        if config.text_encoder:
            raise DatasetError("data.text_encoder: encodes captions, and data.captions = false reads none (set it to true)")
        if not config.labels:
            return DatasetInfo((3, size, size), has_validation=has_validation)
        names = tuple(read_classes(config.classes_file).values()) if config.classes_file else ()
        advice = "if it is meant, data.classes_file declares the classes"
        num_classes = len(names) or num_classes_of(train.labels, train.shown, advice)
        _check_labels(train, num_classes, config.classes_file)
        if config.validation_path:
            _check_labels(_open(config, "validation"), num_classes, config.classes_file)
        return DatasetInfo((3, size, size), Classes(num_classes, names), has_validation)

    def __init__(self, config: WebDatasetConfig, split: Split) -> None:
        samples = _open(config, split)
        positions = np.arange(len(samples))
        if not config.validation_path:
            positions = split_positions(len(samples), split, config.validation_fraction)
        labels = samples.labels[positions]
        labelled = config.labels and not config.captions
        super().__init__(samples, positions, labels, config.required_size(), labelled=labelled)
        self.encodes_captions = bool(config.text_encoder)
        self._captioned, self._trigger_word = config.captions, config.trigger_word

    def captions(self, indices: np.ndarray) -> list[str]:
        """Captions of images, one line each, with the trigger word. Raises DatasetError: as where they are not read."""
        if not self._captioned:
            raise DatasetError("data.captions: false, so that captions are not read (set it to true)")
        return captions_of(cast(CaptionedSource, self._source), self._positions[indices], self._trigger_word)


def _check_labels(samples: Samples, num_classes: int, classes_file: str) -> None:
    wrong = np.flatnonzero(samples.labels >= num_classes)
    if len(wrong):
        known = "data.classes_file" if classes_file else "data.path"
        label = samples.labels[wrong[0]]
        raise DatasetError(f"{samples.shown(wrong[0])}: label {label} is not in 0..{num_classes - 1}, those of {known}")


def _open(config: WebDatasetConfig, split: Split) -> Samples:
    key = "validation_path" if split == "validation" and config.validation_path else "path"
    path = getattr(config, key)
    if not config.captions:
        samples = _open_shards(f"data.{key}", path, False)
        of_labels = np.isin(samples.problems, (NO_LABEL, BAD_LABEL))
        return samples if config.labels else dataclasses.replace(samples, problems=np.where(of_labels, 0, samples.problems))
    samples = _open_shards(f"data.{key}", path, True)
    _check_captions(samples, config.trigger_word)
    return samples


@lru_cache(maxsize=4)  # a run opens the same shards several times
def _open_shards(key: str, path: str, captioned: bool) -> Samples:
    shards = find_shards(key, path)
    left_out: Counter[str] = Counter()
    reading = tqdm(shards, "reading shards", delay=2, leave=False)
    read = [_read_shard(shard, captioned, left_out) for shard in reading]
    say_left_out(path, left_out)
    counts = [len(rows) for _, rows in read]
    if sum(counts) == 0:
        raise DatasetError(f"{key}: {path!r} has no samples in it")
    rows = np.concatenate([rows for _, rows in read])  # [N, 7]
    lengths = np.concatenate([np.diff(names.offsets) for names, _ in read])
    images = TarImages(
        archives=OpenArchives(shards),
        archive=np.repeat(np.arange(len(shards), dtype=np.int32), counts),
        offsets=rows[:, 0].copy(),
        sizes=rows[:, 1].copy(),
        names=PackedNames(np.concatenate([names.letters for names, _ in read]), np.concatenate(([0], np.cumsum(lengths)))),
    )
    return Samples(images, rows[:, 2].copy(), rows[:, 3].astype(np.uint8), rows[:, 4:].copy() if captioned else None)


def _check_captions(samples: Samples, trigger_word: str) -> None:
    """Check that every sample has an image and a caption. Raises DatasetError, with shard and key."""
    wrong = np.flatnonzero(samples.problems)
    if len(wrong):
        raise DatasetError(f"{samples.shown(wrong[0])}: {PROBLEMS[samples.problems[wrong[0]]]}")
    assert samples.texts is not None
    captions_of(samples, np.flatnonzero(samples.texts[:, 2])[:1], trigger_word)  # refuses [trigger] without a word


def find_shards(key: str, path: str) -> list[Path]:
    """Tar files of a folder (by name), pattern, {000..127} or {a,b}. Raises DatasetError: none, or one is missing."""
    if not path:
        raise DatasetError(f"{key}: not given; webdataset needs a folder of tar shards, or train-{{000..127}}.tar")
    if "://" in path or path.startswith("pipe:"):
        raise DatasetError(f"{key}: {path!r} is not on this machine; webdataset reads local shards (copy them here)")
    expanded = os.path.expanduser(path)
    if os.path.isdir(expanded):
        found = sorted(file for file in Path(expanded).glob("*.tar") if not file.name.startswith("."))
    else:
        names = expand_braces(expanded)
        found = [Path(file) for name in names for file in ([name] if os.path.isfile(name) else _matches(name))]
        missing = [file for file in found if not file.is_file()]
        if missing:
            raise DatasetError(f"{key}: {len(missing)} of {len(found)} shards do not exist, first {missing[0]}")
    if not found:
        raise DatasetError(f"{key}: {path!r} stands for no tar file")
    return found


def _matches(name: str) -> list[str]:
    return sorted(glob.glob(name)) if glob.has_magic(name) else [name]


def expand_braces(pattern: str) -> list[str]:
    """Expand the braces of a pattern as a shell does: {a,b} and {08..11}, several of them too."""
    match = re.search(r"\{([^{}]*)\}", pattern)
    if match is None:
        return [pattern]
    limits = re.fullmatch(r"(\d{1,18})\.\.(\d{1,18})", match[1])
    if limits:
        width = max(map(len, limits.groups())) if any(text.startswith("0") for text in limits.groups()) else 0
        choices = [f"{number:0{width}}" for number in range(int(limits[1]), int(limits[2]) + 1)]
    else:
        choices = match[1].split(",")
    before, after = pattern[: match.start()], pattern[match.end() :]
    return [name for choice in choices for name in expand_braces(before + choice + after)]


def _read_shard(path: Path, captioned: bool, left_out: Counter[str]) -> tuple[PackedNames, np.ndarray]:
    """Read the keys of a shard's samples, in the order in which they first appear, and what `_describe` says of each, [n, 7].

    Args:
        left_out: counts the samples that have a picture of another ending instead of an image.
    """
    groups: dict[bytes, dict[bytes, list[Member]]] = {}
    for member in read_members(path):
        folder, _, name = member.name.rpartition(b"/")
        key, _, extension = name.partition(b".")
        if key:  # names that begin with a dot belong to no sample
            files = groups.setdefault(os.path.join(folder, key), {})
            files.setdefault(extension.lower(), []).append(member)
    keys, rows = [], []
    with open_regular(path) as file:

        def read(member: Member) -> bytes:
            file.seek(member.offset)
            return file.read(member.size)

        for key, files in groups.items():
            images = _images(files)
            unread = next((ending for ending in files if ending in PICTURES_NOT_READ), None)
            if unread and not images:
                left_out[unread.decode()] += 1
            elif images or files.keys() & {b"cls", b"txt"}:  # else a README or the like
                keys.append(key)
                rows.append(_describe(files, images, read, captioned))
    return PackedNames.of(keys), np.array(rows, np.int64).reshape(len(rows), 7)


def _describe(
    files: dict[bytes, list[Member]], images: list[Member], read: Callable[[Member], bytes], captioned: bool
) -> tuple[int, ...]:
    """Describe a sample: offset and size of its image, its label, its problem, and what `_caption` says."""
    if len(images) != 1:
        return 0, 0, 0, SEVERAL_IMAGES if images else NO_IMAGE, 0, 0, False
    place = images[0].offset, images[0].size
    if captioned:
        problem, *caption = _caption(files.get(b"txt", []), read)
        return *place, 0, problem, *caption
    described = files.get(b"cls")
    label, problem = _label(read(described[0])) if described else (0, NO_LABEL)
    return *place, label, problem, 0, 0, False


def _caption(texts: list[Member], read: Callable[[Member], bytes]) -> tuple[int, int, int, bool]:
    """Describe a caption: its problem, offset and size, and whether it has [trigger]."""
    if not texts:
        return NO_CAPTION, 0, 0, False
    try:
        text = read(texts[0]).decode("utf-8-sig")
    except UnicodeDecodeError:
        return NOT_UTF8, 0, 0, False
    return 0 if text.strip() else EMPTY_CAPTION, texts[0].offset, texts[0].size, PLACEHOLDER.search(text) is not None


def _images(files: dict[bytes, list[Member]]) -> list[Member]:
    return [member for extension, members in files.items() if extension in SUFFIXES for member in members]


def _label(text: bytes) -> tuple[int, int]:
    text = text.removeprefix(codecs.BOM_UTF8)
    return (int(text), 0) if re.fullmatch(rb"\s*\d{1,6}\s*", text) else (0, BAD_LABEL)
