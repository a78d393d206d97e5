"""Places that a run writes to, kept in its own folder and apart by programs that start several runs."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torchtitan.files.regular import user_path
from torchtitan.settings.schema import default_of, expanded
from torchtitan.settings.sections import all_sections, keys

# The folder, within that of a sweep or study, for what its runs may share: indexes and caches of data.
SHARED_FOLDER = "shared"


def written_places(config: Any) -> Iterator[tuple[str, str, dataclasses.Field]]:
    """Written places: dotted key, value and field of every key that names one; see `writes` of `setting`."""
    for section, values in all_sections(config):
        for field in keys(values):
            if field.metadata.get("writes"):
                yield f"{section}.{field.name}", getattr(values, field.name), field


def place_problems(config: Any, folder: Path, dump_folder: Path, name: str) -> list[tuple[str, str]]:
    """Find keys that would make one of several runs write elsewhere than into its own folder and the shared one.

    Returns:
        dotted key, and cause with remedy, of each misplaced key.
    """
    own = {"job.dump_folder": expanded(str(dump_folder)), "job.name": name}
    shared = folder / SHARED_FOLDER
    problems = []
    for key, value, field in written_places(config):
        if field.metadata["writes"] == "run" and value != own.get(key, default_of(field)):
            text = f"every run writes into a separate folder in {folder}, so {value!r} cannot be given (remove it)"
            problems.append((key, text))
        elif field.metadata["writes"] == "shared" and value and not _is_within(Path(value), shared):
            text = f"{value!r} is outside of {folder}, where all of its runs write (remove it, or set it below {shared})"
            problems.append((key, text))
    return problems


def _is_within(path: Path, folder: Path) -> bool:
    inside, whole = (user_path(each).resolve() for each in (path, folder))
    return inside.is_relative_to(whole)
