"""Source of images to be encoded: splits of a dataset, one after the other, each in its stored order."""

import hashlib
import itertools
import os
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from torchtitan.conditions import Classes, Unconditional
from torchtitan.data import DATASETS
from torchtitan.data.base import (
    Batch,
    DataConfig,
    Dataset,
    DatasetError,
    DatasetInfo,
    Split,
    UnreadableImage,
    require_one_shape,
)
from torchtitan.files.regular import user_path
from torchtitan.latents.index import SkippedImage
from torchtitan.settings.schema import toml_value
from torchtitan.training.data_loading import read_checked

SourceSplit = Literal["train", "validation", "all"]
SAMPLED_IMAGES = 16


class ImageSource:
    """Images of a dataset, or of one of its buckets, by number; survives pickling, as the dataset does.

    Attributes:
        info: of the dataset, with the shape of the bucket.
        split: "all" is the training images and then those held out.
    """

    def __init__(self, config: DataConfig, info: DatasetInfo, split: SourceSplit, bucket: int | None = None) -> None:
        """Raises DatasetError: no pixels to encode, no image in that split, or buckets, and none is given."""
        if config.name == "latents":
            raise DatasetError("data.name: latents are encoded already; name a dataset of images")
        if info.image_shape[0] != 3:
            raise DatasetError(
                f"data.name: {config.name} has images of shape {list(info.image_shape)}; those that autoencoders take "
                "have 3 channels"
            )
        if not isinstance(info.condition_kind, Unconditional | Classes):
            raise DatasetError(
                f"data.name: {config.name} gives {info.condition_kind.wanted}, and a latent store keeps classes only"
            )
        if split == "validation" and not info.has_validation:
            raise DatasetError(f"--split validation: {config.name} holds out no images here")
        self.info = info if bucket is None else replace(info, image_shape=info.bucket_shapes[bucket], bucket_shapes=())
        self.split = split
        self.bucket = bucket
        self._whole_info = info
        self._config = config
        splits: list[Split] = ["train", "validation"] if split == "all" else [split]
        self._parts: list[Dataset] = [
            DATASETS[config.name](config, part) for part in splits if part == "train" or info.has_validation
        ]
        if bucket is None:
            require_one_shape(self._parts[0], "a latent store")
        ranges = [_range_of(part, bucket) for part in self._parts]
        self._firsts = [numbers.start for numbers in ranges]
        self._starts = np.cumsum([0, *map(len, ranges)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def name(self) -> str:
        return f"data.name = {self._config.name}"

    def captions(self) -> list[str]:
        """Captions of all images. Raises DatasetError: they have none, or one cannot be read."""
        found: list[str] = []
        for part, first, count in zip(self._parts, self._firsts, np.diff(self._starts).tolist(), strict=True):
            found += part.captions(np.arange(first, first + count)) if count else []
        return found

    @property
    def dataset(self) -> Dataset:
        """Dataset of the first split."""
        return self._parts[0]

    def read(self, numbers: range) -> tuple[Tensor, Tensor, list[SkippedImage]]:
        """Read consecutive images.

        Args:
            numbers: in [0, len(self)), at least one.

        Returns:
            those that can be decoded: images float32 [n, 3, H, W] in [-1, 1], labels int64 [n]; and the others.

        Raises:
            DatasetError: any other failure than an image that cannot be decoded.
        """
        pieces = []
        for part, first, start, end in zip(self._parts, self._firsts, self._starts, self._starts[1:], strict=False):
            inside = np.arange(max(numbers.start, start), min(numbers.stop, end))
            if len(inside):
                pieces.append(self._read_part(part, int(start) - first, inside - start + first))
        images, labels, skipped = zip(*pieces, strict=True)
        return torch.cat(images), torch.cat(labels), list(itertools.chain(*skipped))

    def _read_part(self, part: Dataset, shift: int, indices: np.ndarray) -> tuple[Tensor, Tensor, list[SkippedImage]]:
        """Read images of a part, whose number here is their index there + shift."""
        try:
            return *self._images_and_labels(read_checked(part, self._whole_info, indices)), []
        except UnreadableImage:
            pass  # find out which, one by one
        images, labels = [torch.empty(0, *self.info.image_shape)], [torch.empty(0, dtype=torch.int64)]
        skipped = []
        for index in indices.tolist():
            try:
                image, label = self._images_and_labels(read_checked(part, self._whole_info, np.array([index])))
                images.append(image)
                labels.append(label)
            except UnreadableImage as error:
                if not error.damaged:  # left out, it would be for good
                    raise DatasetError(f"{error} (no damaged image; mend that)") from error
                path = self._without_place(error.path)
                skipped.append(SkippedImage(image=shift + index, path=path, reason=error.reason))
        return torch.cat(images), torch.cat(labels), skipped

    def _images_and_labels(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Labels as a latent store keeps them: int64 [B], all 0 without classes."""
        images = batch["images"]
        return images, batch["class"] if self.info.num_classes else torch.zeros(len(images), dtype=torch.int64)

    def origin(self) -> dict[str, Any]:
        """Origin of the images, wherever they lie: the dataset's keys, their number, a hash of some."""
        keys = {
            name: value
            for name, value in toml_value(self._config).items()
            if self._config.__dataclass_fields__[name].metadata.get("trajectory", True)
            and not name.endswith(("path", "_file"))
            and name not in ("horizontal_flip", "missing_caption")  # of training, or known by the captions
            and not (name == "labels" and value)
        }
        buckets = {} if self.bucket is None else {"bucket": list(self.info.image_shape[1:])}
        return buckets | {
            "data": keys, "split": self.split, "num_images": len(self), "listing": self._listing_digest(),
            "sample": self._sample_digest(),
        }  # fmt: skip

    def _listing_digest(self) -> str:
        listings = [part.listing_digest() for part in self._parts]
        return hashlib.sha256("".join(listings).encode()).hexdigest()[:16]

    def _sample_digest(self) -> str:
        digest = hashlib.sha256()
        for number in np.unique(np.linspace(0, len(self) - 1, SAMPLED_IMAGES).astype(np.int64)).tolist():
            images, labels, _ = self.read(range(number, number + 1))
            digest.update(images.numpy().tobytes() + labels.numpy().tobytes())
        return digest.hexdigest()

    def _without_place(self, path: str) -> str:
        """Path of a file relative to the dataset's place, so that a store does not depend on that."""
        for given in (self._config.path, self._config.validation_path):
            place = user_path(given or os.devnull)
            for folder in (place, place.parent):
                if path.startswith(f"{folder}/"):
                    return path[len(str(folder)) + 1 :]
        return path

    def place_of(self, path: str) -> str:
        """Path of a file of which `SkippedImage` has the path relative to the dataset's place."""
        places = [user_path(given) for given in (self._config.path, self._config.validation_path) if given]
        folders = (folder for place in places for folder in (place, place.parent))
        return next((str(folder / path) for folder in folders if (folder / path.partition(": ")[0]).exists()), path)


def open_sources(config: DataConfig, info: DatasetInfo, split: SourceSplit) -> list[ImageSource]:
    """Sources of a dataset, one per bucket with images. Raises DatasetError: no pixels, or no image in that split."""
    if not info.bucket_shapes:
        return [ImageSource(config, info, split)]
    sources = [ImageSource(config, info, split, bucket) for bucket in range(len(info.bucket_shapes))]
    return [source for source in sources if len(source)]


def _range_of(part: Dataset, bucket: int | None) -> range:
    if part.buckets is None or bucket is None:
        return range(len(part))
    end = int(part.buckets[: bucket + 1].sum())
    return range(end - int(part.buckets[bucket]), end)
