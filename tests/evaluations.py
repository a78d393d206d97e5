"""Images and an extractor for tests of evaluation."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from torchtitan.errors import EvaluationError
from torchtitan.fidelity.extraction import extract_images
from torchtitan.fidelity.feature_extractor import FeatureExtractor
from torchtitan.fidelity.frechet import FrechetReference
from torchtitan.fidelity.images import open_images
from torchtitan.fidelity.moments import Moments


def frechet_distance(samples: Moments, reference: Moments) -> float:
    return FrechetReference(reference).distance(samples)


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


def extracted_on_this_rank(images: str, batch_size: int, damaged: int = -1) -> Any:
    """Extract as one of the running ranks: rows of the images on rank 0; on all what is wrong, if anything is."""
    from torchtitan.distributed.collectives import group_for_work

    extractors = {"projection": Projection(), "other": Projection(dim=3, name="other")}
    outputs = {"projection": ["pooled", "logits"], "other": ["pooled"]}
    source = open_images(Path(images))
    if damaged >= 0:
        (Path(images) / f"{damaged:06d}.png").write_bytes(b"damaged")
    try:
        rows = extract_images(source, extractors, outputs, batch_size, group_for_work())
    except EvaluationError as error:
        return str(error)
    return {f"{name} {output}": values.tolist() for (name, output), values in rows.items()}


def damaged_split_on_this_rank(images: int) -> str:
    """Measure against a split with a damaged last image, as one of the running ranks: what the measurement says."""
    from torchtitan.data import DATASETS
    from torchtitan.data.digits import DigitsConfig
    from torchtitan.distributed.collectives import group_for_work
    from torchtitan.evaluation.config import EvaluationConfig
    from torchtitan.evaluation.dataset_images import DatasetImages
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
        metrics.measure(lambda numbers: np.zeros((len(numbers), 8, 8, 3), np.uint8), batch_size=64)
    except EvaluationError as error:
        return str(error)
    return "nothing"
