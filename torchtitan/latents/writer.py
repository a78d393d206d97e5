"""Writing a latent store in any order, by any number of processes, so that it can be killed and gone on with.

While it is being made, a store has a folder PARTIAL_FOLDER in place of the index: the plan in it, and for each finished
shard a note with its size, checksum and moments. The index is written when every shard has its note, then the folder
goes. Shards are cut by image number, so the store's bytes do not depend on who wrote what, or when.
"""

import hashlib
import os
import shutil
from pathlib import Path

import torch
from torch import Tensor

from torchtitan.latents.index import (
    INDEX_FILE,
    PARTIAL_FOLDER,
    LatentStoreError,
    ShardRecord,
    StoreIndex,
    StorePlan,
    parse_record,
    place_durably,
    read_index,
    read_sealed,
    shard_name,
    write_sealed,
)
from torchtitan.latents.shards import shard_content
from torchtitan.latents.statistics import ChannelMoments
from torchtitan.latents.values import decode, encode

PLAN_FILE = "plan.json"


class StoreWriter:
    """One of the processes that write a store; they share the folder and nothing else.

    Each writes some of `pending()`, no two the same, and when all have, one of them calls `finish()`.

    Attributes:
        complete: whether the store was there already, whole: nothing is pending, and `finish` returns its index.
    """

    def __init__(self, folder: str | Path, plan: StorePlan) -> None:
        """Begin a store, or go on with one.

        Raises:
            LatentStoreError: the folder holds something else, or a store of another plan; nothing was changed.
            OSError: it cannot be written.
        """
        self.folder = Path(os.path.expanduser(folder))
        self.plan = plan
        self._partial = self.folder / PARTIAL_FOLDER
        plan_file = self._partial / PLAN_FILE
        if not self._is_complete() and not plan_file.exists():
            # Asked in this order, because another writer may finish the store meanwhile.
            if self._holds_other_files() and not self._is_complete():
                raise LatentStoreError(f"{self.folder}: holds other files; give a new or empty folder")
            if not self._is_complete():
                self._partial.mkdir(parents=True, exist_ok=True)
                write_sealed(plan_file, plan.model_dump(mode="json"))
        self.complete = self._is_complete()
        if self.complete:
            self._compare(read_index(self.folder).plan(), "holds a store with")
        else:
            self._compare(parse_record(StorePlan, read_sealed(plan_file), plan_file), "was begun with")

    def _is_complete(self) -> bool:
        return (self.folder / INDEX_FILE).exists()

    def _holds_other_files(self) -> bool:
        """Whether there is anything but what a writer leaves that was killed before its plan was in place."""
        if not self.folder.exists():
            return False
        drafts = self._partial.glob(f".{PLAN_FILE}.*") if self._partial.is_dir() else ()
        own = {self._partial, self._partial / PLAN_FILE, *drafts}
        return any(path not in own for path in (*self.folder.iterdir(), *self._partial.glob("*")))

    def pending(self) -> list[int]:
        """Numbers of the shards that are not written yet."""
        return [] if self.complete else [n for n in range(self.plan.num_shards) if self._note(n) is None]

    def write(self, number: int, values: Tensor, labels: Tensor) -> None:
        """Write a shard: the images `plan.images_of(number)`.

        Args:
            values: raw latents, float32 [n, V, P, C, h, w], as `pack_views` lays them out.
            labels: int64 [n], all 0 where there are no classes.

        Raises:
            LatentStoreError: they are not what the plan says.
            OSError: the shard cannot be written; it stays pending.
        """
        content = shard_content(self.plan, number, values, labels)
        record = place_durably(self.folder / shard_name(number), content, self._partial)
        # Moments are of what can be read back, so that measuring the store again gives the same.
        moments = ChannelMoments.of(_as_read(values, self.plan))
        note = {"num_images": len(labels), "moments": moments.to_json(), "plan": self._plan_digest()}
        write_sealed(self._note_file(number), record | note)

    def finish(self) -> StoreIndex:
        """Write the index, which makes the folder a store.

        Raises:
            LatentStoreError: shards are pending, or the normalisation cannot be measured.
            OSError: it cannot be written.
        """
        if not self.complete:
            write_sealed(self.folder / INDEX_FILE, self._index().model_dump(mode="json"), self._partial)
            self.complete = True
        shutil.rmtree(self._partial, ignore_errors=True)
        return read_index(self.folder)

    def _index(self) -> StoreIndex:
        notes = [self._note(number) for number in range(self.plan.num_shards)]
        if None in notes:
            raise LatentStoreError(f"{self.folder}: {notes.count(None)} of {len(notes)} shards are not written yet")
        moments = ChannelMoments.from_json(notes[0]["moments"])
        for note in notes[1:]:
            moments = moments.joined(ChannelMoments.from_json(note["moments"]))
        shards = [ShardRecord(**{key: note[key] for key in ShardRecord.model_fields}) for note in notes]
        content = self.plan.model_dump() | {"normalization": self.plan.normalization or moments.normalization()}
        return StoreIndex(**content, shards=shards)

    def _note_file(self, number: int) -> Path:
        return self._partial / f"{shard_name(number)}.json"

    def _note(self, number: int) -> dict | None:
        """What was noted of a finished shard; None where it has to be written (again)."""
        try:
            note = read_sealed(self._note_file(number))
            size = (self.folder / shard_name(number)).stat().st_size
            return note if size == note["size"] and note["plan"] == self._plan_digest() else None
        except (LatentStoreError, OSError):
            return None

    def _plan_digest(self) -> str:
        """Tells shards of this plan from those of another that was begun in the same folder at the same moment."""
        return hashlib.sha256(self.plan.model_dump_json().encode()).hexdigest()

    def _compare(self, begun: StorePlan, verb: str) -> None:
        plans = begun.model_dump(mode="json"), self.plan.model_dump(mode="json")  # as they come back from a file
        for name in StorePlan.model_fields:
            before, now = (plan[name] for plan in plans)
            if before != now:
                raise LatentStoreError(
                    f"{self.folder}: {verb} {name} = {_shown(before)}, this would be {_shown(now)}; give another "
                    "folder, or the same settings and source"
                )


def _as_read(values: Tensor, plan: StorePlan) -> Tensor:
    tensors = encode(values, plan)
    latents = tensors["latents"]
    integers = latents.view(torch.int16 if latents.itemsize == 2 else torch.int8).numpy()
    return decode(integers, tensors["scales"].numpy() if "scales" in tensors else None, plan.dtype)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
