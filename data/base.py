"""Base of datasets: a configuration section, the dataset's properties, and images by index."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from torchtitan import philox
from torchtitan.conditions import Classes, ConditionKind, Entries, Unconditional, placeholder
from torchtitan.settings import setting

if TYPE_CHECKING:
    from torchtitan.latents.store import LatentStore

Batch = dict[str, Tensor]  # by name, images first in each tensor

Split = Literal["train", "validation"]


class DatasetError(Exception):
    """Dataset that cannot be used; the message is one line: the cause and the remedy."""


class UnreadableImage(DatasetError):
    """Image that cannot be decoded: the next one replaces it, and the run continues and reports it.

    Attributes:
        path: its file, or its place in one.
        damaged: its bytes were read and are no image; false: they could not be read, which may be temporary.
    """

    def __init__(self, index: int, path: str, reason: str, damaged: bool = True) -> None:
        super().__init__(index, path, reason, damaged)  # an exception travels between processes by its arguments
        self.index = index
        self.path = path
        self.reason = reason
        self.damaged = damaged

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


# Entries of a batch: its images before they were encoded, and a teacher's features of them.
PIXELS, FEATURES = "pixels", "features"


@dataclass(frozen=True)
class DatasetInfo:
    """Properties of a dataset, known without reading its images.

    Attributes:
        image_shape: (channels, height, width) of every image; of images in buckets that of the bucket with most pixels.
        condition_kind: what comes with each image: `Classes(number, names)`, `Embeddings(...)`, or nothing.
        bucket_shapes: of images of several shapes, the shape of each bucket, in the order of `Dataset.buckets`; empty
            where all images have `image_shape`.
        entries: what a batch has besides images and conditions, as precomputed features that an objective reads.
        training_entries: what batches of training alone have besides, PIXELS or FEATURES, for an alignment or an objective.
    """

    image_shape: tuple[int, int, int]
    condition_kind: ConditionKind = Unconditional()
    has_validation: bool = True
    bucket_shapes: tuple[tuple[int, int, int], ...] = ()
    entries: Entries = field(default_factory=dict)
    training_entries: Entries = field(default_factory=dict)

    @property
    def shapes(self) -> tuple[tuple[int, int, int], ...]:
        return self.bucket_shapes or (self.image_shape,)

    @property
    def num_classes(self) -> int:
        """Number of classes; 0 where images have none."""
        return self.condition_kind.count if isinstance(self.condition_kind, Classes) else 0

    @property
    def class_names(self) -> tuple[str, ...]:
        """One name per class, empty where there are none."""
        return self.condition_kind.names if isinstance(self.condition_kind, Classes) else ()

    @property
    def trained_entries(self) -> Entries:
        """What batches of training have besides images and conditions."""
        return self.entries | self.training_entries

    @property
    def sample_bytes(self) -> int:
        """Size of an image and what comes with it, as a dataset gives them."""
        return sum(value.nbytes for value in self.placeholder(1, self.image_shape, "meta").values())

    @cached_property
    def batch_entries(self) -> dict[tuple[int, int, int], Entries]:
        """Entries of a batch of images of each of the shapes (C, H, W), the images first."""
        others = self.condition_kind.batch_entries | self.entries
        return {shape: {"images": (shape, torch.float32)} | others for shape in self.shapes}

    def placeholder(self, count: int, shape: tuple[int, int, int], device: torch.device | str | None = None) -> Batch:
        """Training batch of `count` images of a shape (C, H, W) in which nothing but shapes and dtypes counts."""
        return placeholder(self.batch_entries[shape] | self.training_entries, count, device)


@dataclass(kw_only=True)
class DataConfig:
    """Keys of `[data]` that every dataset has, and the optional abilities of a dataset.

    A name below without a type is no key: a dataset with that ability declares a setting of that name, and every other
    dataset keeps the constant value here.

    Attributes:
        horizontal_flip: whether the loader mirrors each training image with probability 1/2.
        max_corrupt_share: share of unreadable images that ends a run.
        classes: numbers of the classes to use; empty: all.
        trigger_word: word for the subject in captions; empty: none.
    """

    path = ""
    validation_path = ""
    horizontal_flip = False
    max_corrupt_share = 0.2
    classes = list[int]()
    trigger_word = ""

    name: str = setting("digits", "dataset")
    labels: bool = setting(True, "whether an image's class or caption conditions the network")
    num_workers: int = setting(
        0, "processes per rank that load ahead of training; 0 loads in the training process", ge=0, trajectory=False
    )


@dataclass(frozen=True)
class Draws:
    """Draws of random numbers for the samples of a batch: functions of (seed, purpose, sample number, attempt) alone.

    Attributes:
        samples: global sample numbers, int64 [B].
        attempt: changes after a rollback.
    """

    seed: int
    samples: Tensor
    attempt: int = 0

    def __getitem__(self, slots: slice) -> "Draws":
        return Draws(self.seed, self.samples[slots], self.attempt)

    def uniform(self, purpose: str) -> Tensor:
        """Uniform draws, one number in (0, 1) per sample, float64 [B]."""
        return philox.uniform(self.seed, purpose, self.samples, self.attempt)

    def normal(self, purpose: str, shape: tuple[int, ...]) -> Tensor:
        """Normal draws, float32 [B, *shape]."""
        return philox.normal(self.seed, purpose, self.samples, shape, self.attempt)


class Dataset(ABC):
    """Dataset: a finite collection of images in a fixed order, read by index; base of every dataset.

    It opens one split, as `Dataset(config, "train")`, and raises DatasetError where that cannot be. The object must survive
    pickling, because loader workers may be started by spawning.

    Attributes:
        Config: the dataset's `[data]` section, a subclass of DataConfig; its `name` is a Literal.
        blocks: lengths of the runs of neighbours that are read as one, in order, int64 [K]; training then draws its
            images from `blocks_at_a_time` of them at a time (SampleOrder). None: any image costs as much as any other.
        buckets: of images of several shapes, the number of images of each of `DatasetInfo.bucket_shapes`, int64 [K], some
            perhaps 0: images are numbered bucket by bucket, and a batch is of one bucket. None: one shape.
        fetch_drawn: reads images for training as `fetch` does, where they are themselves drawn at random, by the given draws
            alone. None: training reads what `fetch` gives.
    """

    Config: ClassVar[type[DataConfig]]
    blocks: np.ndarray | None = None
    blocks_at_a_time: int = 1
    buckets: np.ndarray | None = None
    fetch_drawn: Callable[[np.ndarray, Draws], Batch] | None = None

    @staticmethod
    def info(config: Any) -> DatasetInfo:
        """Describe the dataset without reading its images. Raises DatasetError, so that a missing, empty or
        damaged dataset is refused before any process group or model exists."""
        raise NotImplementedError

    @staticmethod
    def store(config: Any) -> "LatentStore":
        """Open the latent store that is trained on. Raises DatasetError: as where the dataset holds no latents."""
        raise DatasetError(f"data.name = {config.name} holds no latents")

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def fetch(self, indices: np.ndarray) -> Batch:
        """Read images and what comes with them.

        Args:
            indices: positions in [0, len(self)), int64 [B].

        Returns:
            "images" float32 [B, C, H, W] with values in about [-1, 1] (unit scale for latents), the entries of
            the dataset's `condition_kind`, as "class" int64 [B], and its `DatasetInfo.entries`; from `fetch_drawn` also
            its `DatasetInfo.training_entries`.

        Raises:
            UnreadableImage: one of them cannot be decoded, and another may take its place.
            DatasetError: anything else, which ends the run.
        """

    def captions(self, indices: np.ndarray) -> list[str]:
        """Captions of images, as they are trained on. Raises DatasetError: as where images have none."""
        advice = "--class-captions makes them of classes"
        raise DatasetError(f"data.name = {self.Config.name}: its images have no captions ({advice})")

    def listing_digest(self) -> str:
        """Hash of which images are listed, where they are files or rows; not of their content."""
        return ""


def bucket_range(dataset: Dataset, index: int) -> tuple[int, int]:
    """First index of an image's bucket, and the one after its last; of the whole dataset where it has no buckets."""
    if dataset.buckets is None:
        return 0, len(dataset)
    ends = np.cumsum(dataset.buckets)
    bucket = int(np.searchsorted(ends, index, side="right"))
    return int(ends[bucket] - dataset.buckets[bucket]), int(ends[bucket])


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
