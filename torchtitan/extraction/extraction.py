"""Extraction of a latent store from a dataset of images, by any number of ranks.

The unit of work is a shard. Pending shards are divided among the ranks when they begin; a killed rank leaves its
unfinished shard to the next start. The store's bytes do not depend on the number of ranks, or on kills.
"""

import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
from tqdm import tqdm

from torchtitan.autoencoders.base import Autoencoder
from torchtitan.distributed.collectives import from_first_rank, of_all_ranks
from torchtitan.errors import LatentStoreError
from torchtitan.extraction.extraction_plan import ExtractionOptions, check_room
from torchtitan.extraction.image_source import ImageSource
from torchtitan.extraction.shard_encoding import check_skipped, encode_shards
from torchtitan.extraction.stage_times import summarize
from torchtitan.latents.index import INDEX_FILE, PARTIAL_FOLDER, StoreIndex, StorePlan, read_index
from torchtitan.latents.writer import StoreWriter, first_difference

SECONDS_BETWEEN_LOOKS = 1.0  # at what other ranks have finished


def begin_store(folder: Path, plan: StorePlan, group: dist.ProcessGroup | None = None) -> list[int]:
    """Begin or resume a store; collective.

    Args:
        plan: equal on all ranks.
        group: of all ranks, for CPU tensors; None: one process.

    Returns:
        numbers of the shards that are not written yet, the same on all ranks.

    Raises, on all ranks:
        LatentStoreError: the folder holds something else, or the disk is too small; nothing was changed.
        OSError: it cannot be written.
    """

    def begin() -> list[int]:
        begun = any((folder / name).exists() for name in (INDEX_FILE, PARTIAL_FOLDER))
        if not begun:  # or else a disk that is too small would find a plan on it
            check_room(folder, plan)
        pending = StoreWriter(folder, plan).pending()
        if begun and pending:
            check_room(folder, plan)
        return pending

    return from_first_rank(begin, group=group)


def check_alike(plans: list[StorePlan]) -> None:
    """Check that every rank is about to write the same store: each has its own dataset and autoencoder.

    Args:
        plans: of all ranks, in their order.

    Raises:
        LatentStoreError: they differ.
    """
    for rank, plan in enumerate(plans):
        if difference := first_difference(plans[0], plan):
            name, wanted, found = difference
            raise LatentStoreError(
                f"rank {rank}: {name} is {found} there and {wanted} on rank 0; give all the same data, files and options"
            )


def extract(
    folder: Path, pending: list[int], source: ImageSource, autoencoder: Autoencoder, plan: StorePlan,
    options: ExtractionOptions, group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Write the shards of a store; called by every rank, each with its own autoencoder.

    Args:
        pending: what `begin_store` returned.
        group: of all ranks, for CPU tensors, with a timeout above the duration of the work; None: one process.

    Returns:
        the summary of `stage_times.summarize`.

    Raises, on the rank where it happens:
        LatentStoreError: the store cannot hold the latents.
        DatasetError: the source cannot be read, or too much of it cannot be decoded.
        OSError: the store cannot be written.
        RuntimeError: another rank was lost, or the device's memory has run out.
    """
    writer = StoreWriter(folder, plan)
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if group else (0, 1)
    mine, started = pending[rank::world_size], time.perf_counter()
    others = sorted({*pending} - {*mine})
    with _Progress(writer, pending, others if rank == 0 else [], shown=rank == 0) as progress:
        times = encode_shards(writer, mine, source, autoencoder, options, progress.advance)
        _wait_for_all(group, progress)
    return summarize(of_all_ranks(times, group), time.perf_counter() - started)


def finish_store(
    folder: Path, plan: StorePlan, max_skipped_share: float, group: dist.ProcessGroup | None = None
) -> StoreIndex:
    """Finish a store: write the index after all shards; collective.

    Raises, on all ranks:
        DatasetError: more than that share of the source could not be decoded.
        LatentStoreError: a shard is missing, or the normalisation cannot be measured.
        OSError: it cannot be written.
    """

    def finish() -> None:
        writer = StoreWriter(folder, plan)
        if not writer.complete:
            check_skipped(writer.skipped(), max_skipped_share, plan)
        writer.finish()

    from_first_rank(finish, group=group)
    return read_index(folder)


def _wait_for_all(group: dist.ProcessGroup | None, progress: "_Progress") -> None:
    if group is None:
        return
    arrival = dist.barrier(group=group, async_op=True)
    while not arrival.is_completed():
        progress.look()
        time.sleep(SECONDS_BETWEEN_LOOKS / 10)
    arrival.wait()
    progress.look(now=True)


class _Progress:
    """Progress bar over the whole store: this rank's images as they are encoded, those of others by finished shards."""

    def __init__(self, writer: StoreWriter, pending: list[int], others: list[int], shown: bool) -> None:
        total = writer.plan.num_source_images
        missing = sum(len(writer.plan.source_images_of(number)) for number in pending)
        self._writer, self._others = writer, others
        self._bar = tqdm(
            total=total, initial=total - missing, unit="img", desc="encoding", disable=not (shown and pending)
        )
        self._looked = time.monotonic()

    def __enter__(self) -> "_Progress":
        return self

    def __exit__(self, *details: object) -> None:
        self._bar.close()

    def advance(self, images: int) -> None:
        self._bar.update(images)
        self.look()

    def look(self, now: bool = False) -> None:
        """Look for shards that others have finished since, at most once in SECONDS_BETWEEN_LOOKS."""
        if not self._others or not (now or time.monotonic() - self._looked > SECONDS_BETWEEN_LOOKS):
            return
        self._looked = time.monotonic()
        done = [number for number in self._others if self._writer.is_written(number)]
        self._others = [number for number in self._others if number not in set(done)]
        self._bar.update(sum(len(self._writer.plan.source_images_of(number)) for number in done))
