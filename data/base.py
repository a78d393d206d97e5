"""Base of datasets: a configuration section, the dataset's properties, and images by index."""

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from torch import Tensor

from torchtitan import philox
from torchtitan.settings import setting

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
        image_shape: (channels, height, width) of every image.
        num_classes: labels are 0 .. num_classes - 1; 0 means that images have no label.
        class_names: one name per class, empty where there are none.
        has_validation: whether the validation split has images.
    """

    image_shape: tuple[int, int, int]
    num_classes: int
    class_names: tuple[str, ...] = ()
    has_validation: bool = True


@dataclass(kw_only=True)
class DataConfig:
    """Keys of `[data]` that every dataset has."""

    name: str = setting("digits", "dataset")
    num_workers: int = setting(
        0, "processes per rank that load ahead of training; 0 loads in the training process", ge=0, trajectory=False
    )
    prefetch_factor: int = setting(
        2, "batches that each loader process holds ready", ge=1, applies={"num_workers": ">0"}, trajectory=False
    )


@dataclass(frozen=True)
class Draws:
    """Draws of random numbers for the samples of a batch: functions of (seed, purpose, sample number, attempt) alone.

    Attributes:
        seed: of the run.
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


class Dataset(Protocol):
    """Dataset: a finite collection of images in a fixed order, read by index.

    The class attribute `Config` is the dataset's `[data]` section, a subclass of DataConfig whose `name` is
    its Literal. The object must survive pickling, because loader workers may be started by spawning.
    """

    Config: type[DataConfig]

    @staticmethod
    def info(config: DataConfig) -> DatasetInfo:
        """Describe the dataset without reading its images. Raises DatasetError, so that a missing, empty or
        damaged dataset is refused before any process group or model exists."""

    def __init__(self, config: DataConfig, split: Split) -> None:
        """Open one split. Raises DatasetError."""

    def __len__(self) -> int: ...

    def fetch(self, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        """Read images.

        Args:
            indices: positions in [0, len(self)), int64 [B].

        Returns:
            images float32 [B, C, H, W] with values in about [-1, 1] (unit scale for latents),
            labels int64 [B] (all 0 where the dataset has no classes).

        Raises:
            UnreadableImage: one of them cannot be decoded, and another may take its place.
            DatasetError: anything else, which ends the run.

        A dataset whose images are themselves drawn at random for training also has `fetch_drawn(indices, draws)`,
        which is then called in its place for the training split: the same images for the same indices and draws.

        A dataset that reads its images by runs of neighbours has `blocks`, their lengths in order, int64 [K], and
        `blocks_at_a_time`: training then draws its images from so many blocks at a time (SampleOrder).
        """
