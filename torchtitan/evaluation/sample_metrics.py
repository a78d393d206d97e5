"""Metrics of samples that a training draws, against the run's own data or a reference."""

import logging
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan.data import DataConfig, DatasetError, dataset_info
from torchtitan.distributed.collectives import from_first_rank, group_for_work, on_all_ranks
from torchtitan.errors import EvaluationError
from torchtitan.evaluation.config import SPLITS, EvaluationConfig
from torchtitan.evaluation.dataset_images import DatasetImages
from torchtitan.fidelity.extraction import extract_features, own_batches
from torchtitan.fidelity.extractors import open_extractor
from torchtitan.fidelity.feature_extractor import FeatureExtractor
from torchtitan.fidelity.feature_set import FeatureSet
from torchtitan.fidelity.images import ImageSet
from torchtitan.fidelity.measurement import Measurement
from torchtitan.fidelity.measuring import (
    Request,
    check_classes,
    check_request,
    check_size,
    features_of_samples,
    measure,
    reference_features,
)
from torchtitan.fidelity.references import Reference, open_reference
from torchtitan.pictures.grids import to_rgb
from torchtitan.processes.launch import launch_number
from torchtitan.programs import program

if TYPE_CHECKING:  # a check of the configuration draws nothing
    from torchtitan.evaluation.decoding import LatentDecoder
    from torchtitan.evaluation.sampling import ImageSampler

logger = logging.getLogger(__name__)

# Images of the run's split of that name. Raises EvaluationError, DatasetError.
OpenSplit = Callable[[str], ImageSet]
MOST_IMAGES = 100_000  # of a reference, whose features a run extracts
_ROLES = ("reference", "held_out")
_SILENT_SECONDS = 60.0  # between lines on how much is drawn, where no bar shows it
# Options of scripts/evaluate.py that messages name -> keys of a configuration.
_KEYS = {
    "--allow-small": "evaluation.allow_small = true", "--held-out": "evaluation.held_out",
    "--reference": "evaluation.reference",
}  # fmt: skip


class SampleMetrics:
    """Metrics of `[evaluation]`; every method is collective.

    Extractors are opened for each measurement, and closed after it: they take no memory from training. The features of
    references stay in the first rank's memory after the first measurement.
    """

    def __init__(
        self, config: EvaluationConfig, device: torch.device, size: tuple[int, int] | None, group: dist.ProcessGroup | None,
        open_split: OpenSplit | None = None, num_classes: int = 0,
    ) -> None:  # fmt: skip
        """
        Args:
            size: height and width of the samples; None: not known yet.
            group: of all ranks, for CPU tensors, with a timeout above the duration of a measurement; None: one process.
            open_split: for references that are splits of the run's data.
            num_classes: classes that samples are drawn for; 0: none.

        Raises:
            EvaluationError: an extractor or reference cannot be opened, or lacks what a metric needs; on every rank.
        """
        self._config, self._device, self._group = config, device, group
        self._request = Request(
            tuple(config.metrics), config.extractor, allow_small=config.allow_small, device=str(device)
        )
        self._open_split, self._num_classes = open_split, num_classes
        self._features: dict[str, dict[str, FeatureSet]] = {}  # of the references, by role
        on_all_ranks(lambda: self._check(size), (EvaluationError,), group)

    @classmethod
    def of_run(cls, config: EvaluationConfig, data: DataConfig, device: torch.device, latents: bool) -> "SampleMetrics":
        """Metrics of a run on these data; collective. Raises EvaluationError, DatasetError."""
        info = dataset_info(data)
        size = None if latents else info.image_shape[1:]
        return cls(config, device, size, group_for_work(), partial(DatasetImages, data, info), info.num_classes)

    @property
    def count(self) -> int:
        return self._config.count

    def measure(
        self, draw: Callable[[Tensor], np.ndarray], batch_size: int, classes: np.ndarray | None = None
    ) -> Measurement:
        """Draw samples, each rank its share, and measure them on the first.

        Args:
            draw: numbers int64 [B] -> pixels uint8 [B, H, W, 3]; may raise EvaluationError; as often on every rank.

        Returns:
            the values of all metrics, with the metrics' notes, on every rank.

        Raises:
            EvaluationError: on every rank.
        """
        progress = sys.stderr.isatty()
        extractors = on_all_ranks(self._extractors, (EvaluationError,), self._group)
        references = on_all_ranks(self._references, (EvaluationError,), self._group)
        for role, reference in references.items():
            if role not in self._features:
                self._features[role] = reference_features(
                    self._request, extractors, reference, held_out=role == "held_out", batch_size=batch_size, group=self._group,
                    progress=progress,
                )  # fmt: skip
        ranks = dist.get_world_size() if self._group else 1
        even = math.ceil(self.count / (ranks * math.ceil(self.count / (ranks * batch_size))))
        pixels = self._drawn(draw, references, own_batches(self.count, even, self._group))
        rows = extract_features(pixels, self.count, even, extractors, self._request.outputs(), self._group, progress)
        samples = features_of_samples(rows, classes)
        return from_first_rank(self._measure, samples, group=self._group)

    def _drawn(
        self, draw: Callable[[Tensor], np.ndarray], references: dict[str, Reference], batches: list[range]
    ) -> Iterator[np.ndarray]:
        said = time.monotonic()
        for place, numbers in enumerate(batches):
            if time.monotonic() - said > _SILENT_SECONDS and launch_number("RANK", 0) == 0 and not sys.stderr.isatty():
                logger.info(f"drawing {self.count:,} samples: {place / len(batches):.0%}")
                said = time.monotonic()
            pixels = draw(torch.arange(numbers.start, numbers.stop))
            for reference in references.values():
                check_size(reference, (pixels.shape[1], pixels.shape[2]))
            yield pixels

    def _check(self, size: tuple[int, int] | None) -> None:
        with _in_keys():
            extractors, references = self._extractors(), self._references()
            check_request(self._request, extractors, self.count, size, *map(references.get, _ROLES))
            check_classes(self._request, extractors, self._num_classes)

    def _extractors(self) -> dict[str, FeatureExtractor]:
        try:
            return {name: open_extractor(name, None, self._device) for name in self._request.extractors()}
        except EvaluationError as error:
            raise EvaluationError(f"evaluation.extractor: {error}") from error

    def _references(self) -> dict[str, Reference]:
        """References by role, without those with features in memory already."""
        return {role: self._reference(role) for role in _ROLES if getattr(self._config, role) and role not in self._features}

    def _reference(self, role: str) -> Reference:
        text, key = getattr(self._config, role), f"evaluation.{role}"
        if text not in SPLITS or self._open_split is None:
            reference = open_reference(text, key)
        else:
            try:
                images = self._open_split(text)
            except (EvaluationError, DatasetError) as error:
                raise EvaluationError(f"{key}: {error}") from error
            reference = Reference(images, images.place)
        if reference.images is not None and len(reference.images) > MOST_IMAGES:
            raise EvaluationError(
                f"{key}: {reference.place} has {len(reference.images):,} images, more than the {MOST_IMAGES:,} that a run "
                f"extracts features of (make a reference once by {program('evaluate')} reference)"
            )
        return reference

    def _measure(self, samples: dict[str, FeatureSet]) -> Measurement:
        found = measure(self._request, samples, *(self._features.get(role, {}) for role in _ROLES))
        values = {name: interval for each in found.values() for name, interval in each.values.items()}
        return Measurement(values, [note for each in found.values() for note in each.notes])


def measure_samples(
    metrics: SampleMetrics, sampler: "ImageSampler", choices: Tensor, seed: int, *, batch_size: int,
    decoder: "LatentDecoder | None" = None, sharded: bool = False, **method: Any,
) -> Measurement:  # fmt: skip
    """Metrics of newly drawn samples; collective.

    Args:
        choices: conditions of the samples, int64 [N].
        decoder: of latents; None for a model of images.

    Raises:
        EvaluationError: on every rank.
    """
    with (
        sampler.drawing(seed, purpose="evaluation", sharded=sharded, **method) as draw_batch,
        decoder.on_device() if decoder else nullcontext(),
    ):

        def draw(numbers: Tensor) -> np.ndarray:
            images = draw_batch(choices[numbers], numbers)
            images = decoder.decode_alone(images) if decoder else images.cpu()
            if damaged := int((~images.isfinite()).flatten(1).any(dim=1).sum()):
                raise EvaluationError(f"{damaged} of {len(images)} samples have values that are not finite")
            return to_rgb(images.numpy())

        return metrics.measure(draw, batch_size, choices.numpy())


@contextmanager
def _in_keys() -> Iterator[None]:
    """Name keys of the configuration in messages instead of options of the command."""
    try:
        yield
    except EvaluationError as error:
        text = str(error)
        for option, key in _KEYS.items():
            text = text.replace(option, key)
        raise EvaluationError(text if text.startswith("evaluation.") else f"[evaluation]: {text}") from error
