"""Base of datasets: a configuration section, the dataset's properties, and images by index."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from torch import Tensor

from torchtitan import philox
from torchtitan.conditions import Classes, ConditionKind, Unconditional
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
        index: position in the split.
        path: its file, or its place in one.
        reason: of the failure, one line.
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


@dataclass(frozen=True)
class DatasetInfo:
    """Properties of a dataset, known without reading its images.

    Attributes:
        image_shape: (channels, height, width) of every image; of images in buckets that of the bucket with most pixels.
        condition_kind: what comes with each image: `Classes(number, names)`, `Embeddings(...)`, or nothing.
        has_validation: whether the validation split has images.
        bucket_shapes: of images of several shapes, the shape of each bucket, in the order of `Dataset.buckets`; empty
            where all images have `image_shape`.
    """

    image_shape: tuple[int, int, int]
    condition_kind: ConditionKind = Unconditional()
    has_validation: bool = True
    bucket_shapes: tuple[tuple[int, int, int], ...] = ()

    @property
    def shapes(self) -> tuple[tuple[int, int, int], ...]:
        """Every shape that an image may have."""
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
    def sample_bytes(self) -> int:
        """Size of an image and what comes with it, as a dataset gives them."""
        return math.prod(self.image_shape) * 4 + self.condition_kind.bytes_per_image()


@dataclass(kw_only=True)
class DataConfig:
    """Keys of `[data]` that every dataset has, and the optional abilities of a dataset.

    A name below without a type is no key: a dataset with that ability declares a setting of that name, and every other
    dataset keeps the constant value here.

    Attributes:
        path: where the data are.
        validation_path: where held-out data are.
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
    labels: bool = setting(True, "whether what comes with an image, as its class, conditions the network")
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
        """Draws for some of the samples."""
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
    """

    Config: ClassVar[type[DataConfig]]
    blocks: np.ndarray | None = None
    blocks_at_a_time: int = 1
    buckets: np.ndarray | None = None

    @staticmethod
    def info(config: Any) -> DatasetInfo:
        """Describe the dataset without reading its images. Raises DatasetError, so that a missing, empty or
        damaged dataset is refused before any process group or model exists."""
        raise DatasetError(f"data.name = {config.name}: its class has no `info`")

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
            "images" float32 [B, C, H, W] with values in about [-1, 1] (unit scale for latents), and the entries of
            the dataset's `condition_kind`, as "class" int64 [B]; any other tensor of B rows travels along.

        Raises:
            UnreadableImage: one of them cannot be decoded, and another may take its place.
            DatasetError: anything else, which ends the run.
        """

    def fetch_drawn(self, indices: np.ndarray, draws: Draws) -> Batch:
        """Fetch for training: as `fetch`, unless images are themselves drawn at random, by these draws alone."""
        return self.fetch(indices)

    def captions(self, indices: np.ndarray) -> list[str]:
        """Captions of images, as they are trained on. Raises DatasetError: as where images have none."""
        advice = "--class-captions makes them of classes"
        raise DatasetError(f"data.name = {self.Config.name}: its images have no captions ({advice})")

    def listing_digest(self) -> str:
        """Hash of which images are listed, where they are files or rows; not of their content."""
        return ""
