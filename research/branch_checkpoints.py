"""Checkpoints of branches: the start of each, and their removal once the branch is measured."""

import os
import shutil
from contextlib import suppress
from pathlib import Path

from torchtitan.checkpoint.checkpointer import checkpoint_steps
from torchtitan.checkpoint.store import store_of
from torchtitan.files.durable import make_folder, sync


def begin_branch(start: Path, branch: Path) -> None:
    """Begin a branch: put the start into its folder, unless it has checkpoints; as hard links if possible."""
    checkpoints = branch / "checkpoint"
    if checkpoint_steps(checkpoints):
        return
    make_folder(checkpoints)
    store_of(checkpoints).prepare()  # what a copy that was cut off has left
    partial = checkpoints / f".{start.name}"
    shutil.copytree(start, partial, copy_function=_link_or_copy)
    sync(partial)
    partial.rename(checkpoints / start.name)
    sync(checkpoints)


def remove_checkpoints(folder: Path) -> None:
    """Remove the checkpoints in a folder of an experiment, and the folder if nothing else is in it. Raises OSError."""
    for step in checkpoint_steps(folder):
        store_of(folder).delete(step)
    with suppress(OSError):  # there is something else in it
        folder.rmdir()


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
        sync(Path(target))
