"""Extraction of a latent store from a dataset of images, by any number of ranks.

The unit of work is a shard. Pending shards are divided among the ranks when they begin; a killed rank leaves its
unfinished shard to the next start. The store's bytes do not depend on the number of ranks, or on kills.
"""

import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from torchtitan.autoencoders.base import Autoencoder
from torchtitan.distributed.collectives import from_first_rank, of_all_ranks
from torchtitan.distributed.shared_work import SharedProgress
from torchtitan.errors import LatentStoreError
from torchtitan.extraction.caption_encoding import Captions, encode_captions
from torchtitan.extraction.extraction_plan import WHOLE, ExtractionOptions, Part, check_room
from torchtitan.extraction.image_source import ImageSource
from torchtitan.extraction.shard_encoding import check_skipped, encode_shards
from torchtitan.extraction.stage_times import summarize
from torchtitan.latents.index import INDEX_FILE, PARTIAL_FOLDER, StoreIndex, StorePlan, read_index
from torchtitan.latents.writer import StoreWriter, first_difference
from torchtitan.texts import TextEncoders


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
    options: ExtractionOptions, captions: Captions | None = None, group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Write the shards of a store; called by every rank, each with its own autoencoder.

    Args:
        pending: what `begin_store` returned, of the options' part.
        captions: of the source, if the store has captions; `extract_captions` writes them.
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
    started = time.perf_counter()

    def images_of(number: int) -> int:
        return len(plan.source_images_of(number))

    total = sum(map(images_of, options.part.of(range(plan.num_shards))))
    with SharedProgress(total, pending, images_of, writer.is_written, group, verb="encoding") as work:
        times = encode_shards(writer, work.mine, source, autoencoder, options, work.advance, captions)
        work.wait_for_all()
    return summarize(of_all_ranks(times, group), time.perf_counter() - started)


def extract_captions(
    folder: Path, plan: StorePlan, captions: Captions, encoders: TextEncoders, group: dist.ProcessGroup | None = None,
    part: Part = WHOLE,
) -> int:  # fmt: skip
    """Write the missing captions of a store, or of a part; called by every rank, each with its own encoders, before `extract`.

    Returns:
        how many texts lost their ends, of those encoded now.

    Raises, on the rank where it happens:
        LatentStoreError: the store cannot hold the embeddings.
        OSError: the store cannot be written.
        RuntimeError: another rank was lost, or the device's memory has run out.
    """
    writer, planned = StoreWriter(folder, plan), plan.captions
    pending = part.of(from_first_rank(writer.pending_captions, group=group))
    if planned is None or not pending:
        return 0

    def texts_of(number: int) -> int:
        return len(planned.texts_of(number))

    total = sum(map(texts_of, part.of(range(planned.num_shards))))
    with SharedProgress(
        total, pending, texts_of, writer.captions_are_written, group, verb="encoding captions", unit="text"
    ) as work:
        cut = encode_captions(writer, work.mine, captions.texts, encoders, work.advance)
        work.wait_for_all()
    return sum(of_all_ranks(cut, group))


def finish_store(
    folder: Path, plan: StorePlan, source: ImageSource, max_skipped_share: float, group: dist.ProcessGroup | None = None
) -> StoreIndex:
    """Finish a store: write the index after all shards; collective.

    Raises, on all ranks:
        DamagedImages: more than that share of the source could not be decoded.
        LatentStoreError: a shard is missing, or the normalisation cannot be measured.
        OSError: it cannot be written.
    """

    def finish() -> None:
        writer = StoreWriter(folder, plan)
        if not writer.complete:
            check_skipped(writer.skipped(), max_skipped_share, source)
        writer.finish()

    from_first_rank(finish, group=group)
    return read_index(folder)
