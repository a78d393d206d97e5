"""Tables of the package `datasets`: from the Hugging Face hub, a folder, or saved by the package itself."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from torchtitan.data.base import DatasetError
from torchtitan.data.captions import caption_at
from torchtitan.data.derived_classes import num_classes_of
from torchtitan.data.image_columns import Columns, find_columns
from torchtitan.data.image_decoding import MAX_FILE_BYTES
from torchtitan.errors import one_line
from torchtitan.extras import install
from torchtitan.files.regular import read_regular, user_path


@dataclass(frozen=True)
class HubImages:
    """Images of a table that is memory-mapped on this machine.

    Attributes:
        num_classes: labels are 0 .. num_classes - 1; 0 without labels.
        labels: int64 [N]; 0 without labels.
        rows: the `datasets.Dataset` of the image column alone, not decoded.
        texts: that of the captions alone, None with labels.
    """

    place: str
    columns: Columns
    num_classes: int
    labels: np.ndarray
    rows: Any
    texts: Any = None
    names = None

    def __len__(self) -> int:
        return len(self.labels)

    def content(self, position: int) -> bytes:
        image = self.rows[position][self.columns.image]
        if not image or (image["bytes"] is None and image["path"] is None):
            raise ValueError("the row has no image")
        return read_regular(image["path"], MAX_FILE_BYTES) if image["bytes"] is None else image["bytes"]

    def label(self, position: int) -> int:
        return int(self.labels[position])

    def text(self, position: int) -> str | None:
        """Caption of an image as it is stored."""
        return self.texts[position][self.columns.beside]

    def shown(self, position: int) -> str:
        return f"{self.place}: row {position}"


def open_hub_table(
    path: str, subset: str, revision: str, split: str, image_column: str, label_column: str, caption_column: str = "",
    trigger_word: str = "", labelled: bool = True,
) -> HubImages:  # fmt: skip
    """Open a split, downloading it where need be.

    Args:
        split: name, or a slice such as "train[:10%]".
        caption_column: name of a column to be read instead of labels, or "".

    Raises:
        DatasetError: no package, or the table is unreadable, lacks columns, or has invalid labels or captions.
    """
    try:
        import datasets
    except ImportError as error:
        raise DatasetError(f"data.name: huggingface needs the package datasets: {install('hub')}") from error
    folder = user_path(path)
    if folder.exists() and revision:
        raise DatasetError(f"data.revision: {path!r} is a folder here; leave the key out")
    if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
        table = _asked(path, lambda: _saved_split(datasets, folder, subset, split))
    else:
        found = str(folder) if folder.exists() else path
        table = _asked(
            path, lambda: datasets.load_dataset(found, subset or None, split=split, revision=revision or None)
        )
    place = f"{path} ({split})"
    columns = find_columns(place, table.features.to_dict(), image_column, label_column, caption_column, labelled)
    if len(table) == 0:
        raise DatasetError(f"data.path: {place} has no rows")
    rows = table.select_columns([columns.image]).cast_column(columns.image, datasets.Image(decode=False))
    if columns.captioned:
        texts = table.select_columns([columns.beside])
        _check_captions(place, texts, columns.beside, trigger_word)
        return HubImages(place, columns, 0, np.zeros(len(table), np.int64), rows, texts)
    if not columns.labelled:
        return HubImages(place, columns, 0, np.zeros(len(table), np.int64), rows)
    labels = _labels(place, table, columns)
    advice = f"if it is meant, make {columns.beside!r} a ClassLabel, which declares the classes"
    num_classes = len(columns.class_names) or num_classes_of(labels, lambda row: f"{place}: row {row}", advice)
    return HubImages(place, columns, num_classes, labels, rows)


def _saved_split(datasets: Any, folder: Path, subset: str, split: str) -> Any:
    """Split of a folder of `save_to_disk`; a table saved alone is the split that it was."""
    if subset:
        raise DatasetError(f"data.config: {folder} is one that save_to_disk wrote; leave the key out")
    saved = datasets.load_from_disk(str(folder))
    splits = saved if isinstance(saved, datasets.DatasetDict) else {str(saved.split or "train"): saved}
    if split not in splits:
        raise DatasetError(f"data.path: {folder} has no split {split!r}; it has {', '.join(splits)}")
    return splits[split]


def _labels(place: str, table: Any, columns: Columns) -> np.ndarray:
    column = table.select_columns([columns.beside]).with_format("arrow")[:][columns.beside]
    if column.null_count:
        raise DatasetError(f"{place}: row {column.is_null().to_pylist().index(True)}: the label is missing")
    labels = column.to_numpy().astype(np.int64)
    largest = len(columns.class_names) - 1 if columns.class_names else np.iinfo(np.int64).max
    wrong = np.flatnonzero((labels < 0) | (labels > largest))
    if len(wrong):
        raise DatasetError(f"{place}: row {wrong[0]}: label {labels[wrong[0]]} is not in 0..{largest}")
    return labels


def _check_captions(place: str, texts: Any, name: str, trigger_word: str) -> None:
    """Check that every row has a caption, and that it fits the trigger word. Raises DatasetError."""
    row = 0
    for part in texts.with_format("arrow")[:][name].chunks:
        for text in part:
            caption_at(f"{place}: row {row}", text.as_py, trigger_word)
            row += 1


def _asked(path: str, ask: Callable[[], Any]) -> Any:
    try:
        return ask()
    except DatasetError:
        raise
    except Exception as error:  # the package and those that it calls have their own
        raise DatasetError(f"data.path: {path!r} cannot be read by the package datasets ({one_line(error)})") from error
