"""Writer of a latent store in any order, by any number of processes, resumable after a kill.

While it is being written, a store has a folder PARTIAL_FOLDER instead of the index: the plan, and for each finished
shard a note with its size, checksum, moments, and the images that were left out. The index is written when every shard
has its note, then the folder is removed. Shards are cut by the images' numbers in the source, so the store's bytes do
not depend on the writers' number, order or interruptions.
"""

import functools
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from torchtitan.errors import LatentStoreError
from torchtitan.files import record_difference
from torchtitan.files.durable import make_folder, remove_unfinished
from torchtitan.files.ownership import foreign_entry, foreign_text
from torchtitan.files.regular import user_path
from torchtitan.files.removal import remove_folder
from torchtitan.latents.captions import caption_content
from torchtitan.latents.index import (
    INDEX_FILE,
    PARTIAL_FOLDER,
    SKIPPED_FILE,
    FileRecord,
    ShardRecord,
    SkippedImage,
    StoreIndex,
    StorePlan,
    caption_shard_name,
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
# Plan and notes, and what a killed writer leaves of them and, formerly, of the store's own files.
_OF_THE_WRITER = re.compile(
    r"plan\.json|(shard|captions)-\d+\.safetensors\.json"
    r"|\.(plan\.json|index\.json|skipped\.jsonl|(shard|captions)-\d+\.safetensors(\.json)?)\.[0-9a-f]{32}(\.unfinished)?"
)
# What has changed where a digest or a number alone does not say it.
_REASONS = {
    "origin.listing": "a file, a row or a caption was added, removed or changed",
    "origin.sample": "an image or a label was changed",
    "captions.digest": "a caption, the null caption or a prompt was changed",
    "captions.num_texts": "captions or prompts were added or removed",
}


class StoreWriter:
    """Store writer: one of the processes that write a store; they share only the folder.

    Each writes some of `pending()`, no two the same, and after the last shard one of them calls `finish()`.

    Attributes:
        complete: whether the store was finished before: nothing is pending, and `finish` returns its index.
    """

    def __init__(self, folder: str | Path, plan: StorePlan) -> None:
        """Begin or resume a store.

        Raises:
            LatentStoreError: the folder holds something else, or a store of another plan; nothing was changed.
            OSError: it cannot be written.
        """
        self.folder = user_path(folder)
        self.plan = plan
        self._partial = self.folder / PARTIAL_FOLDER
        plan_file = self._partial / PLAN_FILE
        if not self._is_complete() and not plan_file.exists():
            # Asked in this order, because another writer may finish the store meanwhile.
            if (name := self._foreign_entry()) and not self._is_complete():
                advice = "give a new or empty folder"
                raise LatentStoreError(foreign_text(self.folder, name, "a latent store's", advice))
            if not self._is_complete():
                make_folder(self._partial)
                write_sealed(plan_file, plan.model_dump(mode="json"))
        self.complete = self._is_complete()
        if self.complete:
            self._compare(read_index(self.folder).plan(), "holds a store with")
        else:
            self._compare(parse_record(StorePlan, read_sealed(plan_file), plan_file), "was begun with")

    def _is_complete(self) -> bool:
        return (self.folder / INDEX_FILE).exists()

    def _foreign_entry(self) -> str | None:
        """Name of an entry that was not left by a writer killed before its plan was in place; None if there is none."""
        name = foreign_entry(self.folder, is_own=lambda path: path.name == PARTIAL_FOLDER)
        return name or foreign_entry(self._partial, is_own=lambda path: path.name == PLAN_FILE)

    def pending(self) -> list[int]:
        """Numbers of the shards that are not written yet."""
        return [number for number in range(self.plan.num_shards) if not self.is_written(number)]

    def is_written(self, number: int) -> bool:
        """Check whether a shard is finished, by any writer."""
        return self._is_complete() or self._note(shard_name(number)) is not None

    def pending_captions(self) -> list[int]:
        """Numbers of the files of captions that are not written yet."""
        count = self.plan.captions.num_shards if self.plan.captions else 0
        return [number for number in range(count) if not self.captions_are_written(number)]

    def captions_are_written(self, number: int) -> bool:
        """Check whether a file of captions is finished, by any writer."""
        return self._is_complete() or self._note(caption_shard_name(number)) is not None

    def write(
        self, number: int, values: Tensor, labels: Tensor, skipped: Sequence[SkippedImage] = (), captions: Tensor | None = None
    ) -> None:
        """Write a shard: the images `plan.source_images_of(number)`, except those that could not be decoded.

        Args:
            values: raw latents, float32 [n, V, P, C, h, w], as `pack_views` lays them out.
            labels: int64 [n], all 0 where there are no classes.
            skipped: the images of the shard that are not among these.
            captions: numbers of the captions, int64 [n]; None where the plan has no captions.

        Raises:
            LatentStoreError: the store cannot hold a value or label.
            OSError: the shard cannot be written; it stays pending.
        """
        left_out = {entry.image for entry in skipped}
        images = [image for image in self.plan.source_images_of(number) if image not in left_out]
        content = shard_content(self.plan, images, values, labels, captions)
        record = place_durably(self.folder / shard_name(number), content)
        # Moments are of what can be read back, so that measuring the store again gives the same.
        moments = ChannelMoments.of(_as_read(values, self.plan, images)).to_json() if images else None
        note = {
            "num_images": len(images), "moments": moments, "plan": self._plan_digest(),
            "skipped": [entry.model_dump() for entry in skipped],
        }  # fmt: skip
        write_sealed(self._note_file(shard_name(number)), record | note)

    def write_captions(self, number: int, texts: Sequence[str], embeddings: Mapping[str, Tensor]) -> None:
        """Write a file of captions: the texts `plan.captions.texts_of(number)`.

        Args:
            embeddings: TEXT [n, L, D] and POOLED [n, P].

        Raises:
            LatentStoreError: the store cannot hold a value.
            OSError: the file cannot be written; it stays pending.
        """
        assert self.plan.captions is not None  # or there would be no file to write
        name = caption_shard_name(number)
        record = place_durably(self.folder / name, caption_content(self.plan.captions, texts, embeddings))
        write_sealed(self._note_file(name), record | {"plan": self._plan_digest()})

    def skipped(self) -> list[SkippedImage]:
        """Images left out of the finished shards of an unfinished store, in order."""
        notes = [note for number in range(self.plan.num_shards) if (note := self._note(shard_name(number)))]
        return [SkippedImage(**entry) for note in notes for entry in note["skipped"]]

    def finish(self) -> StoreIndex:
        """Finish the store: write the index.

        Raises:
            LatentStoreError: shards are pending, all images were skipped, or the normalisation cannot be measured.
            OSError: it cannot be written.
        """
        if not self.complete:
            index, skipped = self._index(), self.skipped()
            if skipped:
                lines = "".join(json.dumps(entry.model_dump(), ensure_ascii=False) + "\n" for entry in skipped)
                place_durably(self.folder / SKIPPED_FILE, lines.encode())
            else:
                (self.folder / SKIPPED_FILE).unlink(missing_ok=True)  # a shard may have been damaged, and made anew
            write_sealed(self.folder / INDEX_FILE, index.model_dump(mode="json"))
            self.complete = True
        with suppress(OSError):  # what stays of it does no harm
            remove_folder(self._partial, lambda name: _OF_THE_WRITER.fullmatch(name) is not None)
            remove_unfinished(self.folder)
        return read_index(self.folder)

    def _index(self) -> StoreIndex:
        wanted = self.plan.num_shards
        notes = [note for number in range(wanted) if (note := self._note(shard_name(number))) is not None]
        if missing := len(self.pending_captions()):
            raise LatentStoreError(f"{self.folder}: {missing} files of captions are not written yet")
        if len(notes) < wanted:
            raise LatentStoreError(f"{self.folder}: {wanted - len(notes)} of {wanted} shards are not written yet")
        shards = [ShardRecord(**{key: note[key] for key in ShardRecord.model_fields}) for note in notes]
        held = sum(shard.num_images for shard in shards)
        if not held:
            raise LatentStoreError(f"{self.folder}: none of {self.plan.num_source_images} images could be decoded")
        parts = [ChannelMoments.from_json(note["moments"]) for note in notes if note["moments"]]
        normalization = self.plan.normalization or functools.reduce(ChannelMoments.joined, parts).normalization()
        return StoreIndex(
            **self.plan.model_dump() | {"normalization": normalization}, num_images=held, shards=shards,
            caption_shards=self._caption_records(),
        )  # fmt: skip

    def _caption_records(self) -> list[FileRecord]:
        count = self.plan.captions.num_shards if self.plan.captions else 0
        notes = [note for number in range(count) if (note := self._note(caption_shard_name(number)))]
        return [FileRecord(size=note["size"], sha256=note["sha256"]) for note in notes]

    def _note_file(self, name: str) -> Path:
        return self._partial / f"{name}.json"

    def _note(self, name: str) -> dict | None:
        """Note of a finished file of the store; None if it must be written (again)."""
        try:
            note = read_sealed(self._note_file(name))
            size = (self.folder / name).stat().st_size
            return note if size == note["size"] and note["plan"] == self._plan_digest() else None
        except (LatentStoreError, OSError):
            return None

    def _plan_digest(self) -> str:
        """Digest of the plan, to tell shards of another plan begun in the same folder at the same moment."""
        return hashlib.sha256(self.plan.model_dump_json().encode()).hexdigest()

    def _compare(self, begun: StorePlan, verb: str) -> None:
        if difference := first_difference(begun, self.plan):
            place, before, now = difference
            reason = next((f" ({text})" for start, text in _REASONS.items() if place.startswith(start)), "")
            raise LatentStoreError(
                f"{self.folder}: {verb} {place} = {before}, this would be {now}{reason}; give another folder, or the same "
                "settings and source"
            )


def first_difference(one: StorePlan, other: StorePlan) -> tuple[str, str, str] | None:
    """First place where two plans differ, and its value in each; None if they are equal."""
    return record_difference.first_difference(one.model_dump(mode="json"), other.model_dump(mode="json"))


def _as_read(values: Tensor, plan: StorePlan, images: Sequence[int]) -> Tensor:
    tensors = encode(values, plan, images)
    latents = tensors["latents"]
    integers = latents.view(torch.int16 if latents.itemsize == 2 else torch.int8).numpy()
    return decode(integers, tensors["scales"].numpy() if "scales" in tensors else None, plan.dtype)
