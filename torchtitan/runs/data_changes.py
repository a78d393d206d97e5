"""Changes of the data between a checkpoint and the run that resumes from it, which no key of the configuration shows."""

from collections.abc import Mapping
from itertools import zip_longest
from typing import Any

from torchtitan.data.base import DatasetInfo
from torchtitan.errors import CheckpointError
from torchtitan.runs.portable import RECORD
from torchtitan.settings.schema import quoted

IMAGES = "images_per_epoch"  # entry of a checkpoint's state: number of training images


def data_changes(state: Mapping[str, Any], place: str, info: DatasetInfo, num_images: int, *, tolerated: bool) -> list[str]:
    """Compare the data with those that a checkpoint was trained on, as far as it records them.

    Args:
        state: of the checkpoint.
        place: of the checkpoint, for messages.
        info: of the data.
        num_images: of the training.
        tolerated: other names of as many classes are accepted.

    Returns:
        tolerated changes, a line each.

    Raises:
        CheckpointError: the classes are others.
    """
    changes = []
    if change := _change_of_classes(state.get(RECORD), info):
        same_count, text = change
        if not (same_count and tolerated):
            nevertheless = ", or --job.allow_config_change true to resume it nevertheless" if same_count else ""
            raise CheckpointError(f"{place}: {text} (restore the classes, or give another --job.name{nevertheless})")
        changes.append(f"{place}: {text}")
    if state.get(IMAGES, num_images) != num_images:
        counts = f"was trained on {state[IMAGES]} images, and the data have {num_images} now"
        changes.append(f"{place}: {counts}; the order within an epoch is another")
    return changes


def _change_of_classes(record: Any, info: DatasetInfo) -> tuple[bool, str] | None:
    """Whether as many classes are there, and the first change in words; None if there is none, or no record."""
    if not isinstance(record, Mapping) or not record:
        return None
    count, names = record.get("num_classes", 0), record.get("class_names", [])
    comparable = isinstance(names, list) and names and info.class_names
    pairs = zip_longest(names, info.class_names) if comparable else ()
    differing = next(((number, *pair) for number, pair in enumerate(pairs) if pair[0] != pair[1]), None)
    if count == info.num_classes and differing is None:
        return None
    text = f"was trained on {count} classes, and the data have {info.num_classes} now"
    if count == info.num_classes:
        text = "was trained on other classes than the data have now"
    if differing:
        number, before, now = differing
        text += f": class {number} was {_shown(before)} and is {_shown(now)}"
    return count == info.num_classes, text


def _shown(name: str | None) -> str:
    return "none" if name is None else quoted(name)
