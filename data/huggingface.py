"""Hugging Face image datasets: on the hub, in a folder, or streamed from parquet files anywhere."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, cast

import numpy as np

from torchtitan.conditions import class_kind
from torchtitan.data.base import DatasetError, DatasetInfo, Split
from torchtitan.data.captions import CaptionedSource, captions_of
from torchtitan.data.hub_tables import HubImages, open_hub_table
from torchtitan.data.image_files import SquareImages, SquareImagesConfig, check_readable
from torchtitan.data.online_text import OnlineTextConfig, online_kind
from torchtitan.data.parquet_files import RowGroups, read_footers, table_url
from torchtitan.data.row_groups import RowGroupImages
from torchtitan.data.splits import split_positions, spread_evenly
from torchtitan.data.trigger_words import TRIGGER_KEY
from torchtitan.settings import setting

GIB = 2**30

_MOST_GIB = 4  # of the row groups that a loader process holds


@dataclass(kw_only=True)
class HuggingFaceConfig(OnlineTextConfig, SquareImagesConfig):
    """`[data]` with name = "huggingface"."""

    name: Literal["huggingface"] = setting("huggingface", "dataset")
    path: str = setting("", "name on the Hugging Face hub, folder, or URL of parquet files (with data.streaming)", path=True)
    config: str = setting("", "subset of the dataset; default: the only one")
    revision: str = setting("", "branch, tag or commit on the hub; default: the newest")
    split: str = setting("train", "split for training")
    validation_split: str = setting("", "split of held-out images; default: a part of data.split")
    validation_fraction: float = setting(
        0.05, "share of data.split held out, spread evenly over its order", ge=0, lt=1,
        applies={"validation_split": ("",)},
    )  # fmt: skip
    image_column: str = setting("", "column of images; default: the only one")
    label_column: str = setting("", "column of class labels; default: the only one", applies={"caption_column": ("",)})
    caption_column: str = setting("", "column of captions, texts, to be read instead of class labels")
    trigger_word: str = setting("", TRIGGER_KEY, applies={"caption_column": "set"})
    streaming: bool = setting(False, "read parquet files where they are, a row group at a time, without a copy here")
    shuffle_row_groups: int = setting(
        64, "row groups whose images are shuffled among themselves, and held by each loader process", ge=1,
        applies={"streaming": (True,)},
    )  # fmt: skip


class HuggingFace(SquareImages):
    """Colour images [3, S, S] with the labels or captions of a column.

    Without `validation_split` image i of the split is held out where floor((i + 1) f) > floor(i f),
    f = `validation_fraction`. Images and their numbers are the same with and without streaming; the order of training
    is not (see `blocks` in data/base.py).
    """

    Config = HuggingFaceConfig

    @staticmethod
    def info(config: HuggingFaceConfig) -> DatasetInfo:
        size = config.required_size()
        if config.text_encoder and not config.caption_column:
            raise DatasetError("data.text_encoder: encodes captions, and data.caption_column is not given (name the column)")
        images, columns, num_classes = _open(config, "train")
        check_readable(images, "data.path")
        has_validation = bool(spread_evenly(len(images), config.validation_fraction).any())
        if config.validation_split:
            held_out, held_out_columns, held_out_classes = _open(config, "validation")
            if held_out_columns.class_names != columns.class_names or held_out_classes > num_classes:
                raise DatasetError(
                    f"data.validation_split: classes of {config.validation_split!r} are not those of {config.split!r}"
                )
            check_readable(held_out, "data.validation_split")
            has_validation = True
        kind = online_kind(config) or class_kind(num_classes, columns.class_names)
        return DatasetInfo((3, size, size), kind, has_validation)

    def __init__(self, config: HuggingFaceConfig, split: Split) -> None:
        images, columns, _ = _open(config, split)
        positions = np.arange(len(images))
        if not config.validation_split:
            positions = split_positions(len(images), split, config.validation_fraction)
        labels = None
        if not columns.labelled or isinstance(images, HubImages):
            labels = images.labels[positions] if columns.labelled else np.zeros(len(positions), np.int64)
        super().__init__(images, positions, labels, config.required_size(), labelled=columns.labelled)
        self.encodes_captions = bool(config.text_encoder)
        self._captioned, self._trigger_word = columns.captioned, config.trigger_word
        if isinstance(images, RowGroupImages):
            groups = np.searchsorted(images.groups.starts, positions, side="right") - 1
            counts = np.bincount(groups)
            self.blocks = counts[counts > 0]
            self.blocks_at_a_time = config.shuffle_row_groups

    def captions(self, indices: np.ndarray) -> list[str]:
        """Captions of images, one line each, with the trigger word. Raises DatasetError: as where images have none."""
        if not self._captioned:
            raise DatasetError("data.caption_column: not given; it names the column of captions")
        return captions_of(cast(CaptionedSource, self._source), self._positions[indices], self._trigger_word)


def _open(config: HuggingFaceConfig, split: Split) -> tuple:
    """Open a split: its images, columns and number of classes. Raises DatasetError."""
    if not config.path:
        raise DatasetError("data.path: not given; huggingface needs a name on the hub, a folder or a URL")
    if config.validation_split == config.split:
        raise DatasetError(f"data.validation_split: {config.split!r} is the training split; name another, or leave it out")
    name = config.validation_split if split == "validation" and config.validation_split else config.split
    asked = (config.config, config.revision, name, config.image_column, config.label_column, config.caption_column)
    if not config.streaming:
        if "://" in config.path:
            raise DatasetError(f"data.path: {config.path!r} is a URL, which only data.streaming = true reads")
        table = _open_table(config.path, *asked, config.trigger_word, config.labels)
        return table, table.columns, table.num_classes
    groups = _open_groups(config.path, *asked, config.labels)
    num_kept = config.shuffle_row_groups if split == "train" else 1  # held-out images are read in order
    _check_memory(config, groups, num_kept)
    return RowGroupImages(groups, num_kept), groups.columns, groups.num_classes


@lru_cache(maxsize=4)  # a run opens the same split several times
def _open_table(*asked: Any) -> HubImages:
    return open_hub_table(*asked)


@lru_cache(maxsize=4)
def _open_groups(path: str, subset: str, revision: str, *asked: Any) -> RowGroups:
    return read_footers(table_url(path, revision), subset, *asked)


def _check_memory(config: HuggingFaceConfig, groups: RowGroups, num_kept: int) -> None:
    """Refuse a window that may exceed its memory limit."""
    largest = np.sort(groups.image_bytes)[-num_kept:].sum() / GIB
    if largest > _MOST_GIB:
        raise DatasetError(
            f"data.shuffle_row_groups: {num_kept} row groups of {config.path} take up to "
            f"{largest:.3g} GiB, more than {_MOST_GIB} (take fewer)"
        )
