"""Images and an extractor for tests of evaluation."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from torchtitan.errors import EvaluationError
from torchtitan.evaluation.feature_files import FeatureFolder, extract_features, hash_images
from torchtitan.evaluation.image_sets import open_images
from torchtitan.features.base import FeatureExtractor


class Projection(FeatureExtractor):
    """Random projections of pixels; a given image is turned into NaN."""

    def __init__(self, dim: int = 6, name: str = "projection", damaged: int = -1) -> None:
        self.name, self.dims = name, {"pooled": dim, "logits": 4}
        self.device, self.weights_sha256 = torch.device("cpu"), f"{dim:064x}"
        self.resize, self.comparable_with = "none", "nothing"
        self._damaged = damaged

    def _features(self, images: Tensor) -> dict[str, Tensor]:
        pixels = images.float().flatten(1) / 255
        generator = torch.Generator().manual_seed(0)
        found = {
            name: pixels @ torch.randn(pixels.shape[1], size, generator=generator) for name, size in self.dims.items()
        }
        found["pooled"][images.flatten(1)[:, 0] == self._damaged] = torch.nan
        return found


def random_images(count: int, size: int = 8, seed: int = 0) -> np.ndarray:
    """Images uint8 [N, H, W, 3]; the first byte of image i is i % 256."""
    images = np.random.default_rng(seed).integers(0, 256, (count, size, size, 3)).astype(np.uint8)
    images[:, 0, 0, 0] = np.arange(count) % 256
    return images


def write_folder(folder: Path, images: np.ndarray) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number, image in enumerate(images):
        Image.fromarray(image).save(folder / f"{number:06d}.png")
    return folder


def extracted_on_this_rank(images: str, cache: str, chunk: int) -> list[Any]:
    """Extract as one of the running ranks: hash of the images, and the values of the features' moments on rank 0."""
    from torchtitan.distributed.collectives import group_for_work
    from torchtitan.fidelity.moments import MomentsAccumulator

    group = group_for_work()
    hashed = hash_images(open_images(Path(images)), group, chunk=chunk)
    folder = FeatureFolder(Path(cache), Projection())
    with folder.opened(group):
        extract_features(hashed, ["pooled"], folder, 3, group)
        moments = MomentsAccumulator(6)
        for rows in folder.rows(hashed, "pooled"):
            moments.add(rows)
    found = moments.moments()
    return [hashed.sha256, found.mean.tolist(), found.covariance.tolist()]


def damaged_split_on_this_rank(images: int) -> str:
    """Measure against a split with a damaged last image, as one of the running ranks: what the measurement says."""
    from torchtitan.data import DATASETS
    from torchtitan.data.digits import DigitsConfig
    from torchtitan.distributed.collectives import group_for_work
    from torchtitan.evaluation.config import EvaluationConfig
    from torchtitan.evaluation.image_sets import DatasetImages
    from torchtitan.evaluation.sample_metrics import SampleMetrics

    class Damaged(DatasetImages):
        def pixels(self, numbers: range) -> np.ndarray:
            if numbers.stop == images:
                raise EvaluationError(f"dataset digits: image {images - 1} is damaged")
            return super().pixels(numbers)

    split = Damaged(DigitsConfig(), DATASETS["digits"].info(DigitsConfig()), "train")
    config = EvaluationConfig(extractor="digits", reference="train", count=80)
    metrics = SampleMetrics(config, torch.device("cpu"), (8, 8), group_for_work(), lambda name: split)
    try:
        metrics.extract(lambda numbers: (np.zeros((len(numbers), 8, 8, 3), np.uint8), 0), batch_size=64)
    except EvaluationError as error:
        return str(error)
    return "nothing"
