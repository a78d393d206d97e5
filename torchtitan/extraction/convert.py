"""Convert published latents to a store."""

import hashlib
from pathlib import Path

import numpy as np
from tqdm import tqdm

from torchtitan.errors import LatentStoreError
from torchtitan.extraction.sources import LatentSource
from torchtitan.latents.index import StoredDtype, StoreIndex, StorePlan, images_per_shard
from torchtitan.latents.statistics import ChannelMoments
from torchtitan.latents.store import LatentStore
from torchtitan.latents.writer import StoreWriter

SAMPLED_IMAGES = 16


def plan_conversion(
    source: LatentSource,
    *,
    dtype: StoredDtype | None = None,
    num_classes: int = 1000,
    class_names: list[str] | None = None,
    measured: bool = True,
    shard_images: int | None = None,
) -> StorePlan:
    """Plan the store of a source.

    Args:
        source: published latents.
        dtype: of the stored values; None: int8 with the source's own step where it has one, or else float16.
        num_classes: of the labels; 0 stores no labels.
        class_names: one per class.
        measured: whether the normalisation is measured, or else taken from the source's makers.
        shard_images: images per file; None: that of `images_per_shard`.

    Raises:
        LatentStoreError: the source's makers say nothing about normalisation.
        pydantic.ValidationError: class names and classes disagree.
    """
    if not measured and source.normalization is None:
        raise LatentStoreError("the source says nothing about its normalization; have it measured")
    dtype = dtype or ("int8" if source.int8_step else "float16")
    return StorePlan(
        num_source_images=source.num_images,
        images_per_shard=shard_images or images_per_shard(source.num_images),
        shape=source.shape,
        posterior=False,
        mirrored=source.mirrored,
        dtype=dtype,
        int8_step=source.int8_step if dtype == "int8" else None,
        num_classes=num_classes,
        class_names=class_names or [],
        autoencoder={"name": "unknown"},
        normalization=None if measured else source.normalization,
        origin=source.origin | {"sample": _sample_digest(source)},
    )


def _sample_digest(source: LatentSource) -> str:
    """Digest of some latents spread over the source, to distinguish similar sources.

    Without labels, so that a label may be corrected before a conversion resumes.
    """
    digest = hashlib.sha256()
    for number in sorted({*np.linspace(0, source.num_images - 1, SAMPLED_IMAGES, dtype=np.int64).tolist()}):
        digest.update(source.read(number, number + 1)[0].numpy().tobytes())
    return digest.hexdigest()


def convert(source: LatentSource, folder: Path, plan: StorePlan) -> StoreIndex:
    """Write the store, or its missing shards.

    Raises:
        LatentStoreError: the source cannot be read, or the folder holds something else.
        OSError: the store cannot be written.
    """
    writer = StoreWriter(folder, plan)
    pending = writer.pending()
    written = plan.num_source_images - sum(len(plan.source_images_of(number)) for number in pending)
    with tqdm(total=plan.num_source_images, initial=written, unit="img", desc="converting", disable=not pending) as bar:
        for number in pending:
            images = plan.source_images_of(number)
            values, labels = source.read(images.start, images.stop)
            writer.write(number, values, labels if plan.num_classes else labels * 0)
            bar.update(len(images))
    return writer.finish()


def measure(store: LatentStore) -> ChannelMoments:
    """Measure the moments of each channel over all images and views of a store. Raises LatentStoreError."""
    total: ChannelMoments | None = None
    with tqdm(total=len(store), unit="img", desc="measuring") as bar:
        for number in range(store.index.num_shards):
            values, _ = store.read_whole(number)
            if len(values):
                moments = ChannelMoments.of(values)
                total = moments if total is None else total.joined(moments)
            bar.update(len(values))
    if total is None:
        raise LatentStoreError(f"{store.folder}: holds no images")
    return total

