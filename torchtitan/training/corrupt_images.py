"""Corrupt images of a run: logged, counted over all ranks, and listed in the run's folder."""

import logging
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist

from torchtitan.data.base import UnreadableImage
from torchtitan.distributed.collectives import of_all_ranks
from torchtitan.files.patient_file import PatientFile

logger = logging.getLogger(__name__)

CORRUPT_IMAGES_FILE = "corrupt_images.txt"


class CorruptImages:
    """List of corrupt files, each once, however often and on however many ranks it is met."""

    def __init__(self, folder: Path) -> None:
        """folder: the run's; the first rank writes `corrupt_images.txt` there, path and reason, tab between."""
        self._ranks = dist.get_world_size() if dist.is_initialized() else 1
        path = folder / CORRUPT_IMAGES_FILE
        self._file = PatientFile(path, "the list of corrupt images")
        self._writes = self._ranks == 1 or dist.get_rank() == 0
        self._known: dict[str, str] = {}  # path -> reason; on all ranks the same but for what is in _unshared
        self._unshared: dict[str, str] = {}
        if self._writes:
            with suppress(OSError):  # new lines then follow the old ones
                path.unlink(missing_ok=True)  # of an attempt that ended before its first checkpoint

    def record(self, found: Sequence[UnreadableImage]) -> None:
        """Record the corrupt images met by this rank, and log new ones."""
        new = {image.path: image.reason for image in found if image.path not in self._known}
        for path, reason in new.items():
            logger.warning(f"{path}: {reason}; another image takes its place")
        self._unshared |= new
        self._add(new)

    def count(self) -> int:
        """Count the files met by all ranks together; collective."""
        if self._ranks > 1:
            waiting = torch.tensor([len(self._unshared)])
            dist.all_reduce(waiting)
            if waiting.item():
                for met in of_all_ranks(self._unshared):
                    self._add(met)
        self._unshared = {}
        return len(self._known)

    def state_dict(self) -> dict[str, str]:
        """Return path -> reason, equal on all ranks; collective."""
        self.count()
        return dict(sorted(self._known.items()))

    def load_state_dict(self, state: dict[str, str]) -> None:
        self._add(state)

    def sync(self) -> None:
        """Sync the list to the disk, if the disk allows; any thread may call it."""
        self._file.sync()

    def _add(self, found: dict[str, str]) -> None:
        new = {path: reason for path, reason in found.items() if path not in self._known}
        self._known |= new
        if new and self._writes:
            for path, reason in new.items():
                self._file.add(f"{path}\t{reason}\n".encode())
