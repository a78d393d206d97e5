"""Pixels and classes of a split, whole in memory: for programs about images that train no diffusion model."""

from dataclasses import fields

import numpy as np

from torchtitan.data import DATASETS
from torchtitan.data.base import DatasetError, Split
from torchtitan.pictures.grids import to_rgb


def read_labelled_pixels(
    name: str, path: str, split: Split, most: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Read the first images of a split with their classes.

    Args:
        most: number of images; None is all.

    Returns:
        pixels uint8 [N, H, W, 3], gray ones repeated, and classes int64 [N].

    Raises:
        DatasetError: the dataset cannot be read, or has no path.
    """
    dataset_type = DATASETS[name]
    config = dataset_type.Config(name=name)
    if path:
        if "path" not in {each.name for each in fields(config)}:
            raise DatasetError(f"data.path: {path!r}: dataset {name} has none; leave it out")
        config.path = path
    dataset = dataset_type(config, split)
    batch = dataset.fetch(np.arange(min(len(dataset), most or len(dataset))))
    return to_rgb(batch["images"].numpy()), batch["class"].numpy()
