"""What is to be extracted and how, decided before the first image is encoded."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pydantic
import torch

from torchtitan.autoencoders.base import Autoencoder, AutoencoderError, dtype_name
from torchtitan.autoencoders.tiling import TiledAutoencoder
from torchtitan.extraction.image_source import ImageSource
from torchtitan.latents.index import LatentStoreError, Normalization, StorePlan, first_problem, images_per_shard
from torchtitan.latents.values import tensor_shapes


@dataclass(frozen=True)
class ExtractionOptions:
    """How a source is encoded.

    Attributes:
        mirrored: whether mirror images are encoded too.
        dtype: of the stored values.
        normalization: "measured" on the store, or of the "autoencoder"'s own configuration.
        batch_size: images that are encoded at once.
        shard_images: images of the source per file; None: as `images_per_shard` has it.
        threads: of torch on the CPU, on each rank.
        num_workers: processes that decode, on each rank; 0: none beside the one that encodes.
        max_skipped_share: of the source that may be left out because it cannot be decoded.
    """

    mirrored: bool = True
    dtype: Literal["float16", "bfloat16", "int8"] = "float16"
    normalization: Literal["measured", "autoencoder"] = "measured"
    batch_size: int = 16
    shard_images: int | None = None
    threads: int = 1
    num_workers: int = 2
    max_skipped_share: float = 0.2


def plan_extraction(source: ImageSource, autoencoder: Autoencoder, options: ExtractionOptions) -> StorePlan:
    """What the store is to be.

    Raises:
        AutoencoderError: the images do not suit the autoencoder, or it has no normalisation of its own.
        LatentStoreError: impossible numbers.
        DatasetError: the source cannot be read.
    """
    shape, posterior = _probe(autoencoder, source.info.image_shape, options.batch_size)
    normalization = None
    if options.normalization == "autoencoder":
        if autoencoder.normalization is None:
            raise AutoencoderError(
                f"--normalization autoencoder: {autoencoder.name} has no normalization of its own (have it measured)"
            )
        normalization = Normalization(**autoencoder.normalization, source="autoencoder")
    _, height, width = source.info.image_shape
    try:
        return StorePlan(
            num_source_images=len(source),
            images_per_shard=options.shard_images or images_per_shard(len(source)),
            shape=shape,
            posterior=posterior,
            mirrored=options.mirrored,
            dtype=options.dtype,
            num_classes=source.info.num_classes,
            class_names=list(source.info.class_names),
            image_size=height if height == width else None,
            autoencoder=autoencoder.identity(),
            normalization=normalization,
            origin=source.origin() | {"encoding": _encoding(autoencoder, options)},
        )
    except pydantic.ValidationError as failure:
        raise LatentStoreError(first_problem(failure)) from failure


def _probe(autoencoder: Autoencoder, image_shape: tuple[int, int, int], batch_size: int) -> tuple[tuple, bool]:
    """Shape of the latents, and whether they have a deviation; on a GPU, whether a batch fits its memory."""
    count = batch_size if autoencoder.device.type == "cuda" else 1
    latents = autoencoder.encode(torch.zeros(count, *image_shape))
    return tuple(latents.mean.shape[1:]), latents.std is not None


def _encoding(autoencoder: Autoencoder, options: ExtractionOptions) -> dict[str, Any]:
    """What the last bits of the latents depend on."""
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
    shapes = tensor_shapes(plan, plan.num_source_images).values()
    return sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in shapes)


def check_room(folder: Path, plan: StorePlan) -> None:
    """Make sure that the disk has room for what is missing of a store. Raises LatentStoreError."""
    place = next(parent for parent in (folder, *folder.absolute().parents) if parent.is_dir())
    there = sum(path.stat().st_size for path in folder.glob("shard-*.safetensors"))
    needed, free = estimated_size(plan) - there, shutil.disk_usage(place).free
    if needed > free:
        raise LatentStoreError(
            f"{folder}: {needed / 2**30:.1f} GiB are needed, {free / 2**30:.1f} GiB free (another disk; --store-dtype "
            "int8 and --no-mirror take half each)"
        )
