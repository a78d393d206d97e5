"""Images of a dataset's splits, as samples are compared with them."""

from typing import Any

import numpy as np

from torchtitan.data import DATASETS, LATENT_DATASETS, DataConfig, DatasetError, DatasetInfo
from torchtitan.data.base import Split, require_one_shape
from torchtitan.errors import EvaluationError, unwrapped
from torchtitan.fidelity.images import ImageSet
from torchtitan.pictures.grids import to_rgb
from torchtitan.programs import program
from torchtitan.training.data_loading import read_checked


class DatasetImages(ImageSet):
    """Images of splits of a dataset, rounded to 8 bits as samples are."""

    def __init__(self, config: DataConfig, info: DatasetInfo, split: str) -> None:
        """split: train, validation, or all, in this order. Raises EvaluationError: no pixels there; DatasetError."""
        self.place = f"dataset {config.name}"
        dataset = DATASETS[config.name]
        if config.name in LATENT_DATASETS or info.image_shape[0] not in (1, 3):
            made = f"make a reference of the images that they were made of: {program('evaluate')} reference DATASET --name NAME"
            raise EvaluationError(f"{self.place}: holds latents, not images ({made})")
        if split == "validation" and not info.has_validation:
            raise EvaluationError(f"{self.place}: holds out no images here")
        splits: list[Split] = ["train"] if split == "train" else ["validation"]
        if split == "all":
            splits = ["train", "validation"] if info.has_validation else ["train"]
        self._parts = [dataset(config, part) for part in splits]
        require_one_shape(self._parts[0], "a set of images to compare")
        self._starts = np.cumsum([0, *map(len, self._parts)])
        self._config, self._info, self._split = config, info, split

    @property
    def size(self) -> tuple[int, int]:
        return self._info.image_shape[1], self._info.image_shape[2]

    def pixels(self, numbers: range) -> np.ndarray:
        pieces = []
        for part, start, end in zip(self._parts, self._starts, self._starts[1:], strict=False):
            inside = np.arange(max(numbers.start, start), min(numbers.stop, end))
            if len(inside):
                try:
                    pieces.append(to_rgb(read_checked(part, self._info, inside - start)["images"].numpy()))
                except DatasetError as error:
                    advice = "repair or remove it: no image is left out here"
                    raise EvaluationError(f"{self.place}: {unwrapped(error)} ({advice})") from error
        return np.concatenate(pieces)

    def record(self) -> dict[str, Any]:
        return {"kind": "dataset", "place": self._config.name, "split": self._split}

    def _count(self) -> int:
        return int(self._starts[-1])
