"""Plan of an extraction, fixed before the first image is encoded."""

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pydantic
import torch

from torchtitan.autoencoders.base import Autoencoder, AutoencoderError, dtype_name
from torchtitan.autoencoders.tiling import TiledAutoencoder
from torchtitan.errors import LatentStoreError
from torchtitan.extraction.image_source import ImageSource
from torchtitan.latents.captions import caption_shapes
from torchtitan.latents.index import CaptionPlan, Normalization, StorePlan, first_problem, images_per_shard
from torchtitan.latents.values import tensor_shapes


@dataclass(frozen=True)
class Part:
    """Every `count`-th of a store's files from `number` < `count` on, where several starts share them."""

    number: int = 0
    count: int = 1

    @property
    def whole(self) -> bool:
        return self.count == 1

    def of(self, files: Iterable[int]) -> list[int]:
        """Numbers of files that belong to the part."""
        return [file for file in files if file % self.count == self.number]


WHOLE = Part()


@dataclass(frozen=True)
class ExtractionOptions:
    """Options of an extraction.

    Attributes:
        normalization: "measured" on the store, from the "autoencoder"'s own configuration, or given.
        shard_images: images of the source per file; None: that of `images_per_shard`.
        threads: of torch on the CPU, on each rank.
        num_workers: decoding processes of each rank; 0: the encoding process decodes.
        max_skipped_share: of the source that may be left out because it cannot be decoded.
        part: of the files, to write; the index is written by a start for all of them.
    """

    mirrored: bool = True
    dtype: Literal["float16", "bfloat16", "int8"] = "float16"
    normalization: Literal["measured", "autoencoder"] | Normalization = "measured"
    batch_size: int = 16
    shard_images: int | None = None
    threads: int = 1
    num_workers: int = 2
    max_skipped_share: float = 0.2
    part: Part = WHOLE


def plan_extraction(
    source: ImageSource, autoencoder: Autoencoder, options: ExtractionOptions, captions: CaptionPlan | None = None
) -> StorePlan:
    """Plan the store, with captions or without.

    Raises:
        AutoencoderError: the images do not suit the autoencoder, or it has no normalisation of its own.
        LatentStoreError: impossible numbers.
        DatasetError: the source cannot be read.
    """
    shape, posterior = _probe(autoencoder, source.info.image_shape, options.batch_size)
    normalization = options.normalization if isinstance(options.normalization, Normalization) else None
    if options.normalization == "autoencoder":
        if autoencoder.normalization is None:
            raise AutoencoderError(
                f"--normalization autoencoder: {autoencoder.name} has no normalization of its own (have it measured)"
            )
        normalization = Normalization(**autoencoder.normalization, source="autoencoder")
    _, height, width = source.info.image_shape
    try:
        return StorePlan(
            num_source_images=len(source), images_per_shard=options.shard_images or images_per_shard(len(source)),
            shape=shape, posterior=posterior, mirrored=options.mirrored, dtype=options.dtype,
            num_classes=source.info.num_classes, class_names=list(source.info.class_names),
            image_size=height if height == width else None, autoencoder=autoencoder.identity(),
            normalization=normalization, origin=source.origin() | {"encoding": _encoding(autoencoder, options)},
            captions=captions,
        )  # fmt: skip
    except pydantic.ValidationError as failure:
        raise LatentStoreError(first_problem(failure)) from failure


def _probe(autoencoder: Autoencoder, image_shape: tuple[int, int, int], batch_size: int) -> tuple[tuple, bool]:
    """Probe the autoencoder: shape of the latents, whether they have a deviation; on a GPU, whether a batch fits."""
    count = batch_size if autoencoder.device.type == "cuda" else 1
    latents = autoencoder.encode(torch.zeros(count, *image_shape))
    return tuple(latents.mean.shape[1:]), latents.std is not None


def _encoding(autoencoder: Autoencoder, options: ExtractionOptions) -> dict[str, Any]:
    """Settings that decide the last bits of the latents."""
    encoding = {
        "batch_size": options.batch_size, "device": autoencoder.device.type, "dtype": dtype_name(autoencoder.dtype),
        "threads": options.threads,
    }  # fmt: skip
    if isinstance(autoencoder, TiledAutoencoder):
        step = autoencoder.downscale
        encoding |= {"tile": autoencoder.tile * step, "overlap": autoencoder.overlap * step}
    return encoding


def estimated_size(plan: StorePlan) -> int:
    """Bytes of the store's tensors if no image is skipped."""
    shapes = [*tensor_shapes(plan, plan.num_source_images).values()]
    if plan.captions:
        shapes += caption_shapes(plan.captions, plan.captions.num_texts).values()
    return sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in shapes)


def check_room(folder: Path, plan: StorePlan) -> None:
    """Check that the disk has room for the missing part of a store. Raises LatentStoreError."""
    place = next(parent for parent in (folder, *folder.absolute().parents) if parent.is_dir())
    there = sum(path.stat().st_size for kind in ("shard", "captions") for path in folder.glob(f"{kind}-*.safetensors"))
    needed, free = estimated_size(plan) - there, shutil.disk_usage(place).free
    if needed > free:
        raise LatentStoreError(
            f"{folder}: {needed / 2**30:.1f} GiB are needed, {free / 2**30:.1f} GiB free (another disk; --store-dtype "
            "int8 and --no-mirror take half each)"
        )
