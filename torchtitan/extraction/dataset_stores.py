"""Latent stores of a dataset: one, or one for each shape of its images, planned together and written one after the other."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from torchtitan.autoencoders.base import Autoencoder
from torchtitan.distributed.collectives import from_first_rank, of_all_ranks
from torchtitan.extraction.caption_encoding import Captions, collect_captions, plan_captions
from torchtitan.extraction.extraction import begin_store, check_alike, extract, extract_captions
from torchtitan.extraction.extraction_plan import ExtractionOptions, plan_extraction
from torchtitan.extraction.image_source import ImageSource
from torchtitan.latents.bucketed import begin_buckets, bucket_folder, finish_buckets
from torchtitan.latents.index import CaptionDtype, StorePlan
from torchtitan.texts import TextEncoders


@dataclass(frozen=True)
class CaptionOptions:
    """Options of a store's captions.

    Attributes:
        template: makes captions of classes; None: those of the images.
        null_caption: stands for no condition.
        prompts: texts for grids of samples; empty: the classes' captions, or the first of the images'.
    """

    template: str | None = None
    null_caption: str = ""
    prompts: Sequence[str] = ()
    dtype: CaptionDtype = "bfloat16"


@dataclass
class PlannedStore:
    """Store of a source of images: all of a dataset, or one bucket of them.

    Attributes:
        pending: numbers of the shards that are not written yet.
    """

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
        encoders: of captions; None: the store has none.

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
        store.pending = begin_store(store.folder, store.plan, group)


def write_store(
    store: PlannedStore, autoencoder: Autoencoder, encoders: TextEncoders | None, options: ExtractionOptions,
    group: dist.ProcessGroup | None,
) -> tuple[int, dict[str, Any] | None]:  # fmt: skip
    """Complete a store, or the options' part of it; called by every rank.

    Returns:
        captions that lost their ends, and the times of `stage_times.summarize`, None where no image was missing.

    Raises, on the rank where it happens: as `extract` and `extract_captions`.
    """
    cut = 0
    if store.captions and encoders:
        cut = extract_captions(store.folder, store.plan, store.captions, encoders, group, options.part)
    pending = options.part.of(store.pending)
    if not pending:
        return cut, None
    return cut, extract(store.folder, pending, store.source, autoencoder, store.plan, options, store.captions, group)


def finish_stores(folder: Path, stores: Sequence[PlannedStore], group: dist.ProcessGroup | None) -> None:
    """Write the index of all stores of a dataset, once each is finished; collective. Raises LatentStoreError, OSError."""
    if _in_buckets(stores):
        from_first_rank(lambda: finish_buckets(folder, [store.folder for store in stores]), group=group)


def _in_buckets(stores: Sequence[PlannedStore]) -> bool:
    return any(store.source.bucket is not None for store in stores)

