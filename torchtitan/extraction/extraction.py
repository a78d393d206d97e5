"""Latent stores of a dataset: one, or one for each shape of its images, planned together and written one after the other.

The unit of work is a shard. Pending shards are divided among the ranks when they begin; a killed rank leaves its
unfinished shard to the next start. The store's bytes do not depend on the number of ranks, or on kills.
"""

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist

from torchtitan.autoencoders.base import Autoencoder
from torchtitan.distributed.collectives import from_first_rank, of_all_ranks
from torchtitan.distributed.shared_work import SharedProgress
from torchtitan.errors import LatentStoreError
from torchtitan.extraction.caption_encoding import Captions, collect_captions, encode_captions, plan_captions
from torchtitan.extraction.extraction_plan import ExtractionOptions, Part, check_room, plan_extraction
from torchtitan.extraction.image_source import ImageSource
from torchtitan.extraction.shard_encoding import DamagedImages, check_skipped, encode_shards
from torchtitan.latents.bucketed import begin_buckets, bucket_folder, finish_buckets
from torchtitan.latents.index import INDEX_FILE, PARTIAL_FOLDER, CaptionDtype, StoreIndex, StorePlan, read_index
from torchtitan.latents.store import LatentStore
from torchtitan.latents.writer import StoreWriter, first_difference
from torchtitan.texts import TextEncoders


@dataclass(frozen=True)
class CaptionOptions:
    """Options of a store's captions.

    Attributes:
        template: makes captions of classes; None: those of the images.
        prompts: texts for grids of samples; empty: the classes' captions, or the first of the images'.
    """

    template: str | None = None
    null_caption: str = ""
    prompts: Sequence[str] = ()
    dtype: CaptionDtype = "bfloat16"


@dataclass
class PlannedStore:
    """Store of a source of images: all of a dataset, or one bucket of them."""

    folder: Path
    source: ImageSource
    captions: Captions | None
    plan: StorePlan
    pending: list[int] = field(default_factory=list)


def plan_stores(
    folder: Path, sources: Sequence[ImageSource], autoencoder: Autoencoder, encoders: TextEncoders | None,
    options: ExtractionOptions, captions: CaptionOptions,
) -> list[PlannedStore]:  # fmt: skip
    """Plan the store of each source of a dataset.

    Args:
        folder: of the store; of images in buckets it holds one for each.

    Raises:
        AutoencoderError, DatasetError, LatentStoreError: as `plan_extraction` and `plan_captions`.
    """
    stores = []
    for source in sources:
        found = planned = None
        if encoders is not None:
            found = collect_captions(source, captions.template, captions.null_caption, captions.prompts)
            planned = plan_captions(found, encoders, captions.dtype, options.shard_images, captions.template is not None)
        plan = plan_extraction(source, autoencoder, options, planned)
        place = folder if source.bucket is None else bucket_folder(folder, source.info.image_shape)
        stores.append(PlannedStore(place, source, found, plan))
    return stores


def begin_stores(folder: Path, stores: Sequence[PlannedStore], group: dist.ProcessGroup | None) -> None:
    """Begin or resume the stores of a dataset, and note the missing shards of each; collective.

    Raises, on all ranks:
        LatentStoreError: the ranks would write different stores, the folder holds something else, or the disk is too small.
        OSError: it cannot be written.
    """
    for store in stores:
        check_alike(of_all_ranks(store.plan, group))
    if _in_buckets(stores):
        from_first_rank(lambda: begin_buckets(folder, [store.folder for store in stores]), group=group)
    for store in stores:
        store.pending = from_first_rank(_begin, store.folder, store.plan, group=group)


def check_alike(plans: list[StorePlan]) -> None:
    """Check that every rank is about to write the same store. Raises LatentStoreError: datasets or encoders differ."""
    for rank, plan in enumerate(plans):
        if difference := first_difference(plans[0], plan):
            name, wanted, found = difference
            raise LatentStoreError(
                f"rank {rank}: {name} is {found} there and {wanted} on rank 0; give all the same data, files and options"
            )


def _begin(folder: Path, plan: StorePlan) -> list[int]:
    """Begin or resume a store; its missing shards."""
    begun = any((folder / name).exists() for name in (INDEX_FILE, PARTIAL_FOLDER))
    if not begun:  # or else a disk that is too small would find a plan on it
        check_room(folder, plan)
    pending = StoreWriter(folder, plan).pending()
    if begun and pending:
        check_room(folder, plan)
    return pending


def write_store(
    store: PlannedStore, autoencoder: Autoencoder, encoders: TextEncoders | None, options: ExtractionOptions,
    group: dist.ProcessGroup | None,
) -> tuple[list[str], str]:  # fmt: skip
    """Write the missing shards of a store, or of the options' part of it; called by every rank with its own encoders.

    Args:
        group: of all ranks, for CPU tensors, with a timeout above the duration of the work; None: one process.

    Returns:
        captions that lost their ends, of those encoded now, and the speed in words.

    Raises, on the rank where it happens:
        LatentStoreError: the store cannot hold the latents or embeddings.
        DatasetError: the source cannot be read, or too much of it cannot be decoded.
        OSError: the store cannot be written.
        RuntimeError: another rank was lost, or the device's memory has run out.
    """
    plan, started = store.plan, time.perf_counter()
    cut: list[str] = []
    if store.captions and encoders:
        cut = _write_captions(store.folder, plan, store.captions, encoders, options.part, group)
    pending = options.part.of(store.pending)
    if not pending:
        if (store.folder / INDEX_FILE).exists():
            try:
                LatentStore(store.folder)  # refuses where a file was lost since
            except LatentStoreError as error:
                raise DamagedImages(f"{error}, or remove {store.folder}: the same command encodes it anew") from error
        return cut, "nothing was missing (verify reads every byte)"
    writer = StoreWriter(store.folder, plan)

    def images_of(number: int) -> int:
        return len(plan.source_images_of(number))

    total = sum(map(images_of, options.part.of(range(plan.num_shards))))
    with SharedProgress(total, pending, images_of, writer.is_written, group, verb="encoding") as work:
        encode_shards(writer, work.mine, store.source, autoencoder, options, work.advance, store.captions)
        work.wait_for_all()
    images, seconds = sum(map(images_of, pending)), time.perf_counter() - started
    processes = f"{dist.get_world_size()} ranks" if group else "1 process"
    return cut, f"{images:,} images in {seconds:.1f} s on {processes}: {images / seconds:.4g} images/s"


def _write_captions(
    folder: Path, plan: StorePlan, captions: Captions, encoders: TextEncoders, part: Part, group: dist.ProcessGroup | None
) -> list[str]:
    """Write the missing captions of a store, or of a part; the texts that lost their ends."""
    writer, planned = StoreWriter(folder, plan), plan.captions
    pending = part.of(from_first_rank(writer.pending_captions, group=group))
    if planned is None or not pending:
        return []

    def texts_of(number: int) -> int:
        return len(planned.texts_of(number))

    total = sum(map(texts_of, part.of(range(planned.num_shards))))
    with SharedProgress(
        total, pending, texts_of, writer.captions_are_written, group, verb="encoding captions", unit="text"
    ) as work:
        cut = encode_captions(writer, work.mine, captions.texts, encoders, work.advance)
        work.wait_for_all()
    return list(itertools.chain(*of_all_ranks(cut, group)))


def finish_store(store: PlannedStore, max_skipped_share: float, group: dist.ProcessGroup | None = None) -> StoreIndex:
    """Finish a store: write the index after all shards; collective.

    Raises, on all ranks:
        DamagedImages: more than that share of the source could not be decoded.
        LatentStoreError: a shard is missing, or the normalisation cannot be measured.
        OSError: it cannot be written.
    """

    def finish() -> None:
        writer = StoreWriter(store.folder, store.plan)
        if not writer.complete:
            check_skipped(writer.skipped(), max_skipped_share, store.source)
        writer.finish()

    from_first_rank(finish, group=group)
    return read_index(store.folder)


def finish_stores(folder: Path, stores: Sequence[PlannedStore], group: dist.ProcessGroup | None) -> None:
    """Write the index of all stores of a dataset, once each is finished; collective. Raises LatentStoreError, OSError."""
    if _in_buckets(stores):
        from_first_rank(lambda: finish_buckets(folder, [store.folder for store in stores]), group=group)


def _in_buckets(stores: Sequence[PlannedStore]) -> bool:
    return any(store.source.bucket is not None for store in stores)
