"""Small latent stores for the tests, of values that depend on the image's number alone."""

from pathlib import Path

import torch
from torch import Tensor

from torchtitan.latents import StoreIndex, StorePlan, StoreWriter, pack_views

SHAPE = (4, 8, 8)


def plan_of(num_images: int = 20, **changes) -> StorePlan:
    """A plan of several shards of moments and both mirror images."""
    return StorePlan(**{
        "num_source_images": num_images, "images_per_shard": 8, "shape": SHAPE, "posterior": True, "mirrored": True,
        "dtype": "float16", "num_classes": 10, "autoencoder": {"name": "tiny", "sha256": "0" * 64},
    } | changes)  # fmt: skip


def images(plan: StorePlan, first: int, end: int) -> tuple[Tensor, Tensor]:
    """Values float32 [n, V, P, C, h, w] and labels int64 [n] of images first .. end - 1."""
    values = []
    for number in range(first, end):
        generator = torch.Generator().manual_seed(number)
        means = 3 * torch.randn(plan.views, *plan.shape, generator=generator) + 1
        stds = torch.rand(plan.views, *plan.shape, generator=generator) + 0.1
        views = [(means[view][None], stds[view][None] if plan.posterior else None) for view in range(plan.views)]
        values.append(pack_views(views))
    labels = torch.arange(first, end) % plan.num_classes if plan.num_classes else torch.zeros(end - first, dtype=int)
    return torch.cat(values), labels


def write_shard(writer: StoreWriter, number: int) -> None:
    numbers = writer.plan.source_images_of(number)
    writer.write(number, *images(writer.plan, numbers.start, numbers.stop))


def write_store(folder: Path, plan: StorePlan | None = None) -> StoreIndex:
    writer = StoreWriter(folder, plan or plan_of())
    for number in writer.pending():
        write_shard(writer, number)
    return writer.finish()
