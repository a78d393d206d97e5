"""Buckets of a dataset: which shape an image has, and which of its neighbours have the same."""

from collections.abc import Iterator

import numpy as np

from torchtitan.data.base import Dataset, DatasetError, DatasetInfo


def bucket_range(dataset: Dataset, index: int) -> tuple[int, int]:
    """First index of an image's bucket, and the one after its last; of the whole dataset where it has no buckets."""
    if dataset.buckets is None:
        return 0, len(dataset)
    ends = np.cumsum(dataset.buckets)
    bucket = int(np.searchsorted(ends, index, side="right"))
    return int(ends[bucket] - dataset.buckets[bucket]), int(ends[bucket])


def shape_of(dataset: Dataset, info: DatasetInfo, indices: np.ndarray) -> tuple[int, int, int]:
    """Shape (C, H, W) of images of one bucket. Raises DatasetError: they are of several."""
    if dataset.buckets is None:
        return info.image_shape
    buckets = np.unique(np.searchsorted(np.cumsum(dataset.buckets), indices, side="right"))
    if len(buckets) > 1:
        raise DatasetError(f"a batch is of one bucket, and these are of {len(buckets)}")
    return info.bucket_shapes[int(buckets[0])]


def check_buckets(dataset: Dataset, info: DatasetInfo) -> None:
    """Check a dataset's buckets against its info. Raises DatasetError."""
    if dataset.buckets is None and not info.bucket_shapes:
        return
    counts = [] if dataset.buckets is None else [int(count) for count in dataset.buckets]
    if len(counts) != len(info.bucket_shapes) or sum(counts) != len(dataset):
        raise DatasetError(
            f"dataset {type(dataset).Config.name}: buckets of {counts} images are not {len(info.bucket_shapes)} shapes of "
            f"{len(dataset)} images (buckets gives a number for each of DatasetInfo.bucket_shapes)"
        )


def small_buckets(dataset: Dataset, info: DatasetInfo, global_batch_size: int) -> str | None:
    """Report in one line the buckets with fewer images than a step, if there are any."""
    if dataset.buckets is None:
        return None
    small = [
        (int(count), shape)
        for count, shape in zip(dataset.buckets, info.bucket_shapes, strict=True) if 0 < count < global_batch_size
    ]  # fmt: skip
    if not small:
        return None
    count, shape = min(small)
    return (
        f"data: {len(small)} of {len(info.bucket_shapes)} buckets have fewer images than training.global_batch_size = "
        f"{global_batch_size}, the smallest {count} of {'x'.join(map(str, shape))}: a step of such a bucket has images twice "
        "(a smaller batch or fewer buckets have less of it)"
    )


def images_of_shapes(dataset: Dataset, info: DatasetInfo) -> dict[tuple[int, int, int], int]:
    """Number of images of each shape (C, H, W) that any has, in the order of the buckets."""
    if dataset.buckets is None:
        return {info.image_shape: len(dataset)}
    found: dict[tuple[int, int, int], int] = {}
    for shape, count in zip(info.bucket_shapes, dataset.buckets.tolist(), strict=True):
        if count:
            found[shape] = found.get(shape, 0) + count
    return found


def require_one_shape(dataset: Dataset, reader: str) -> None:
    """Refuse images in buckets for a reader that puts any of them into one batch. Raises DatasetError."""
    if dataset.buckets is not None:
        raise DatasetError(
            f"data.name = {type(dataset).Config.name}: {reader} takes images of one shape, and these are in buckets (choose "
            "other data)"
        )


def held_out_parts(dataset: Dataset, total: int) -> Iterator[tuple[int, int, int]]:
    """Number of the first held-out image, its index, and the number of images, of each bucket: `total` in all."""
    ends = np.array([len(dataset)]) if dataset.buckets is None else np.cumsum(dataset.buckets)
    numbers = ends * total // max(len(dataset), 1)  # rounded in sums, so that they add up to the total
    for place, (end, number) in enumerate(zip(ends.tolist(), numbers.tolist(), strict=True)):
        first_index, first_number = (int(ends[place - 1]), int(numbers[place - 1])) if place else (0, 0)
        yield first_number, first_index, min(number - first_number, end - first_index)
