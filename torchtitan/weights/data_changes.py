"""Changes of data and plugins between a checkpoint and the run that resumes from it, which no key of the configuration shows."""

from collections.abc import Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any

from torchtitan.data.base import DatasetInfo
from torchtitan.errors import CheckpointError, look_alike
from torchtitan.settings.plugins import loaded_plugins
from torchtitan.settings.schema import quoted
from torchtitan.weights.model_record import RECORD

# Entries of a checkpoint's state: number of training images, and hash of what they are called.
IMAGES, LISTING = "images_per_epoch", "listing"
_OF_STORES = ("encoder", "shift", "scale")  # of RECORD


def data_changes(
    state: Mapping[str, Any], place: str, info: DatasetInfo, num_images: int, *, tolerated: bool,
    record: Mapping[str, Any] | None = None, listing: str = "",
) -> list[str]:
    """Tolerated changes of the data since a checkpoint, a line each. Raises CheckpointError: the classes are others.

    Args:
        tolerated: other names of as many classes are accepted; the same names in another order never are.
    """
    changes = []
    if text := change_of_classes(state, info):
        count, names = _recorded(state, info)
        if info.class_names and sorted(names) == sorted(info.class_names):  # rows of the class table would be exchanged
            listed = "data.classes_file with a line for each class in the recorded order, and --job.allow_config_change true"
            raise CheckpointError(f"{place}: {text} ({listed}, resume it; or give another --job.name)")
        same_count = count == info.num_classes
        if not (same_count and tolerated):
            nevertheless = ", or --job.allow_config_change true to resume it nevertheless" if same_count else ""
            raise CheckpointError(f"{place}: {text} (restore the classes, or give another --job.name{nevertheless})")
        changes.append(f"{place}: {text}")
    if text := change_of_store(state, record or {}):
        changes.append(f"{place}: {text} (restore it, or train anew)")
    if state.get(IMAGES, num_images) != num_images:
        counts = f"was trained on {state[IMAGES]} images, and the data have {num_images} now"
        changes.append(f"{place}: {counts}; the order within an epoch is another, and so may be which are held out")
    elif not changes and listing and state.get(LISTING, listing) != listing:
        text = "as many images as it was trained on have other names, labels or captions now"
        changes.append(f"{place}: {text}; the order within an epoch may be another, and which are held out")
    return changes


def _recorded(state: Mapping[str, Any], info: DatasetInfo) -> tuple[int, list[str]]:
    """Number and names of a checkpoint's classes; as of the data where its record says nothing, as of captions."""
    if record := state.get(RECORD):
        return record.get("num_classes", 0), record.get("class_names", [])
    return info.num_classes, list(info.class_names)


def change_of_store(state: Mapping[str, Any], record: Mapping[str, Any]) -> str:
    """Change of the store of latents since a checkpoint's state, in words; "" if there is none, or no record."""
    before = state.get(RECORD) or {}
    others = [key for key in _OF_STORES if key in before and key in record and before[key] != record[key]]
    text = f"was trained on latents of another {' and '.join(others)}: of another store, or of one that was made anew since"
    return text if others else ""


def change_of_classes(state: Mapping[str, Any], info: DatasetInfo) -> str:
    """First change of the classes since a checkpoint's state, in words; "" if there is none, or no record."""
    count, names = _recorded(state, info)
    comparable = isinstance(names, list) and names and info.class_names
    pairs = zip_longest(names, info.class_names) if comparable else ()
    differing = next(((number, *pair) for number, pair in enumerate(pairs) if pair[0] != pair[1]), None)
    if count == info.num_classes and differing is None:
        return ""
    text = f"was trained on {count} classes, and the data have {info.num_classes} now"
    if count == info.num_classes:
        text = "was trained on other classes than the data have now"
    if differing:
        number, before, now = differing
        alike = look_alike(before, [now]) if before and now else ""
        text += f": class {number} was {_shown(before)} and is {_shown(now)}{alike}"
    return text


def _shown(name: str | None) -> str:
    return "none" if name is None else quoted(name)


def plugin_changes(before: Mapping[str, str]) -> list[str]:
    """Report each plugin of a checkpoint that is another file now, by its name, or not loaded, by its content; a line each."""
    loaded = loaded_plugins()
    now = {Path(name).name: (name, version) for name, version in loaded.items()}
    found = []
    for name, then in before.items():
        other, version = now.get(Path(name).name, ("", ""))
        if other and version != then:
            found.append(f"plugin {other}: is another file than the checkpoint's ({then[:12]} -> {version[:12]})")
        elif not other and then not in loaded.values():
            instead = f"; loaded are {', '.join(loaded)}" if loaded else ""
            found.append(f"plugin {name}: of the checkpoint is not loaded ({then[:12]}{instead})")
    return found
