"""Shards of one rank, from files to files: other processes decode, this one encodes, a thread writes.

Inside a shard batches are cut by the images' numbers, so that the result does not depend on anything else.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from torchtitan.autoencoders.base import Autoencoder
from torchtitan.data.base import DatasetError
from torchtitan.data.image_decoding import with_advice
from torchtitan.extraction.caption_encoding import Captions
from torchtitan.extraction.extraction_plan import ExtractionOptions
from torchtitan.extraction.image_source import ImageSource
from torchtitan.latents.index import SkippedImage, StorePlan
from torchtitan.latents.values import pack_views
from torchtitan.latents.writer import StoreWriter
from torchtitan.training.data_loading import Batches, read_here
from torchtitan.training.loader_processes import LoaderProcesses


def encode_shards(
    writer: StoreWriter, numbers: list[int], source: ImageSource, autoencoder: Autoencoder,
    options: ExtractionOptions, on_images: Callable[[int], None], captions: Captions | None = None,
) -> None:  # fmt: skip
    """Encode and write shards, one after the other.

    Args:
        numbers: of the shards, none of which another rank writes.

    Raises:
        as `torchtitan.extraction.extraction.write_store`; the shards that are finished stay.
    """
    if not numbers:
        return
    parts = {number: _cut(writer.plan.source_images_of(number), options.batch_size) for number in numbers}
    batches = _decode_ahead(source, [part for number in numbers for part in parts[number]], options.num_workers)
    skipped: list[SkippedImage] = []
    try:
        with ThreadPoolExecutor(max_workers=1) as pool:
            before: Future | None = None
            for number in numbers:
                shard = _Shard(number, writer.plan, captions)
                for part in parts[number]:
                    shard.add(next(batches), autoencoder)
                    on_images(len(part))
                    if before is not None and before.done():
                        before.result()  # what went wrong there ends the work here
                skipped += shard.skipped
                check_skipped(skipped, options.max_skipped_share, source)
                if before is not None:
                    before.result()  # one shard in memory beside the one being encoded
                before = pool.submit(shard.write, writer)
            if before is not None:
                before.result()
    finally:
        batches.close()


class DamagedImages(DatasetError):
    """Images that cannot be decoded, too many to be left out, or that a finished store has lost: found again each time."""


def check_skipped(skipped: list[SkippedImage], largest_share: float, source: ImageSource) -> None:
    """Check the images left out; raise DamagedImages if they are more than that share of a source."""
    if len(skipped) <= largest_share * len(source):
        return
    first = f"{source.place_of(skipped[0].path)}: {with_advice(skipped[0].reason, 'mend or remove it')}"
    if largest_share == 0:
        raise DamagedImages(first)
    raise DamagedImages(
        f"{len(skipped)} of {len(source)} images cannot be decoded, more than a share of {largest_share:g} "
        f"(data.max_corrupt_share); the first is {first}"
    )


class _Shard:
    """Shard in progress."""

    def __init__(self, number: int, plan: StorePlan, captions: Captions | None) -> None:
        self._number, self._plan, self._captions = number, plan, captions
        self._values: list[Tensor] = [torch.empty(0, plan.views, plan.parts, *plan.shape)]
        self._labels: list[Tensor] = [torch.empty(0, dtype=torch.int64)]
        self.skipped: list[SkippedImage] = []

    def add(self, batch: dict[str, Any], autoencoder: Autoencoder) -> None:
        images = batch["images"]
        if len(images):
            views = [images, images.flip(-1)][: self._plan.views]
            encoded = [autoencoder.encode(view) for view in views]
            self._values.append(
                pack_views([(each.mean.cpu(), None if each.std is None else each.std.cpu()) for each in encoded])
            )
        self._labels.append(batch["labels"])
        self.skipped += batch["skipped"]

    def write(self, writer: StoreWriter) -> None:
        labels, captions = torch.cat(self._labels), None
        if self._captions is not None:
            left_out = {entry.image for entry in self.skipped}
            kept = [image for image in self._plan.source_images_of(self._number) if image not in left_out]
            captions = self._captions.of(kept, labels)
        writer.write(self._number, torch.cat(self._values), labels, self.skipped, captions)


def _cut(images: range, batch_size: int) -> list[range]:
    return [images[first : first + batch_size] for first in range(0, len(images), batch_size)]


class _BatchReader:
    """Reader of batches, in this process or in a loader process."""

    def __init__(self, source: ImageSource) -> None:
        self._source = source

    def __getitem__(self, numbers: range) -> dict[str, Any]:
        images, labels, skipped = self._source.read(numbers)
        return {"images": images, "labels": labels, "skipped": skipped}


def _decode_ahead(source: ImageSource, batches: list[range], num_workers: int) -> Batches:
    if not num_workers:
        return read_here(_BatchReader(source), batches)
    return LoaderProcesses(type(source.dataset).Config.name, num_workers, dataset=_BatchReader(source), sampler=batches)
