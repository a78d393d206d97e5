"""Responses of every metric to known changes of real images, in the features of a small extractor.

The samples are held-out images of a dataset, as they are or changed in one way; the reference is a part of its training
images. What each metric must do is known, and the summary says whether it did.
"""

import argparse
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageFilter

from torchtitan.data.base import DatasetError
from torchtitan.data.labelled_pixels import read_labelled_pixels
from torchtitan.evaluation.offline_gradients import EstimateFailed
from torchtitan.experiments.cells import Cell, Row
from torchtitan.experiments.engine import Advance
from torchtitan.experiments.folder import StudyError
from torchtitan.features.base import FeatureExtractor
from torchtitan.features.registry import open_extractor
from torchtitan.features.small import SHIPPED_SHA256
from torchtitan.fidelity.errors import FidelityError
from torchtitan.fidelity.feature_set import FeatureSet, feature_set_of_rows
from torchtitan.fidelity.measurement import Options
from torchtitan.fidelity.metrics import METRICS
from torchtitan_dit.studies.frame import require_at_least, run_study
from torchtitan_dit.studies.metric_responses_report import VALUES, bounds, summary

NAME = "metric_responses"
MEASURED = ("fd", "fd_inf", "kid", "is", "prdc", "memorisation")
COLUMNS = (
    "model", "samples", "count", "reference", *(column for value in VALUES for column in bounds(value)),
    "status", "reason", "date", "runtime",
)  # fmt: skip
KEY = ("model", "samples", "count", "reference")
UNIT = "set"
SEED = 0  # of numpy's PCG64
BLUR = 1 / 16  # of the side, standard deviation
NOISE = 0.2  # of the range of values, standard deviation
BATCH = 500
# Dataset -> images of the reference, and of each set of samples, by default.
COUNTS = {"digits": (1300, 200), "cifar10": (10_000, 3000)}


@dataclass(frozen=True)
class Pool:
    """Images that sets of samples are made of, uint8 [N, H, W, 3].

    Attributes:
        reference: training images that the samples are compared with.
        others: training images that are not in the reference.
        held_out: of the validation split.
        labels: of the held-out images, [N].
        count: images of each set of samples.
    """

    reference: np.ndarray
    others: np.ndarray
    held_out: np.ndarray
    labels: np.ndarray
    count: int

    @property
    def plain(self) -> np.ndarray:
        return self.held_out[: self.count]


# ---------------------------------------------------------------------- sets of samples: pool -> images [count, H, W, 3]


def blurred(pool: Pool) -> np.ndarray:
    filtered = ImageFilter.GaussianBlur(BLUR * pool.plain.shape[1])
    return np.stack([np.asarray(Image.fromarray(image).filter(filtered)) for image in pool.plain])


def noised(pool: Pool) -> np.ndarray:
    noise = np.random.default_rng(SEED).standard_normal(pool.plain.shape)
    return np.rint(pool.plain + 255 * NOISE * noise).clip(0, 255).astype(np.uint8)


def other_proportions(pool: Pool) -> np.ndarray:
    """Four fifths of the first half of the classes, one fifth of the second, instead of equal parts."""
    first = pool.labels < (pool.labels.max() + 1) // 2
    many = 4 * pool.count // 5
    return np.concatenate([pool.held_out[first][:many], pool.held_out[~first][: pool.count - many]])


def repeated(pool: Pool) -> np.ndarray:
    return np.repeat(pool.held_out[: -(-pool.count // 10)], 10, axis=0)[: pool.count]


def half_copied(pool: Pool) -> np.ndarray:
    copies = pool.reference[: pool.count // 2]
    return np.concatenate([copies, pool.held_out[: pool.count - len(copies)]])


SAMPLES: Mapping[str, Callable[[Pool], np.ndarray]] = {
    "held out": lambda pool: pool.plain,
    "training": lambda pool: pool.others,
    "blurred": blurred,
    "noised": noised,
    "other proportions": other_proportions,
    "repeated": repeated,
    "half copied": half_copied,
}


# ---------------------------------------------------------------------- the study


@dataclass
class Responses:
    """Images of a dataset with the extractor of its name, and the options."""

    options: argparse.Namespace
    pool: Pool
    results: Path = Path("outputs/studies")
    extractor: FeatureExtractor = field(init=False)

    def __post_init__(self) -> None:
        self.extractor = open_extractor(self.options.dataset)

    @property
    def description(self) -> str:
        """Description of the study, for the first line of the summary."""
        return (
            f"{self.options.dataset}, features of the extractor `{self.extractor.name}` ({self.extractor.dims['pooled']}). Every"
            f" set has {self.pool.count} images, the reference {len(self.pool.reference)} training images; memorisation is"
            f" calibrated on {len(self.pool.others)} training images that the reference lacks."
        )

    @cached_property
    def reference(self) -> FeatureSet:
        return self.features("reference", self.pool.reference)

    @cached_property
    def metric_options(self) -> Options:
        return Options(allow_small=True, held_out=self.features("other training images", self.pool.others))

    def features(self, name: str, images: np.ndarray) -> FeatureSet:
        parts = [
            self.extractor.extract(torch.from_numpy(images[first : first + BATCH]).permute(0, 3, 1, 2))
            for first in range(0, len(images), BATCH)
        ]
        rows = {output: torch.cat([part[output] for part in parts]).numpy() for output in self.extractor.dims}
        return feature_set_of_rows(name, self.extractor.name, rows)


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("dataset", choices=list(SHIPPED_SHA256), help="dataset, and the small extractor of its name")
    add("--data", default="", metavar="PATH", help="the dataset's place (data.path); digits have none")
    add("--reference", type=int, help="training images in the reference (default: 1,300 digits, 10,000 of CIFAR-10)")
    add("--count", type=int, help="images of each set of samples (default: 200 digits, 3,000 of CIFAR-10)")
    add("--retry-failed", action="store_true", help="measure again the cells whose row says failed")
    add("--output", type=Path, help=f"folder of the results (default: outputs/studies/{NAME}_DATASET)")


def run_alone(arguments: argparse.Namespace) -> Path:
    """Measure every set of samples; return summary.md. Raises StudyError."""
    default_reference, default_count = COUNTS[arguments.dataset]
    arguments.reference = arguments.reference or default_reference
    arguments.count = arguments.count or default_count
    require_at_least(arguments, {"count": 100, "reference": arguments.count})
    torch.set_num_threads(1)  # sums in one order: the same numbers again
    return run_study(f"{NAME}_{arguments.dataset}", sys.modules[__name__], Responses(arguments, read_pool(arguments)))


def read_pool(options: argparse.Namespace) -> Pool:
    """Read the images. Raises StudyError: the dataset cannot be read, or has too few."""
    count, reference = options.count, options.reference
    try:
        training, _ = read_labelled_pixels(options.dataset, options.data, "train", reference + count)
        held_out, labels = read_labelled_pixels(options.dataset, options.data, "validation")
    except DatasetError as error:
        raise StudyError(f"--data: {error}") from error
    pool = Pool(training[:reference], training[reference:], held_out, labels, count)
    if len(training) < reference + count:
        raise StudyError(f"--reference: {reference} and --count {count} need as many training images; there are {len(training)}")
    if len(held_out) < count or len(other_proportions(pool)) < count:
        raise StudyError(
            f"--count: {count} images, four fifths of them of half of the classes, need more held-out images than there are "
            f"({len(held_out)})"
        )
    return pool


def cells(study: Responses) -> list[Cell]:
    common = {"model": study.extractor.name, "count": study.pool.count, "reference": len(study.pool.reference)}
    return [common | {"samples": samples} for samples in SAMPLES]


def cost(cell: Cell) -> int:
    return 1


def measure(study: Responses, cell: Cell, advance: Advance) -> dict[str, Any]:
    """Measure one set with every metric. Raises EstimateFailed: a metric cannot be computed."""
    samples = study.features("samples", SAMPLES[cell["samples"]](study.pool))
    found: dict[str, Any] = {}
    for name in MEASURED:
        try:
            values = METRICS[name].measure(samples, study.reference, study.metric_options).values
        except FidelityError as error:
            raise EstimateFailed(f"{name}: {error}") from error
        for value, interval in values.items():
            if value in VALUES:
                ends = (interval.value, interval.lower, interval.upper)
                found |= {column: f"{end:.6g}" for column, end in zip(bounds(value), ends, strict=True)}
    advance(1)
    return found


def report(study: Responses, rows: list[Row], folder: Path) -> str:
    return summary([row for row in rows if row["status"] == "ok"])
