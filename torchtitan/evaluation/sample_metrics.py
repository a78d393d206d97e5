"""Metrics of samples that a training draws, against references that hold their features."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan.data.base import DatasetError
from torchtitan.distributed.collectives import from_first_rank, of_all_ranks, on_all_ranks
from torchtitan.errors import EvaluationError
from torchtitan.evaluation.config import SPLITS, EvaluationConfig
from torchtitan.evaluation.decoding import LatentDecoder
from torchtitan.evaluation.image_sets import ImageSet
from torchtitan.evaluation.measuring import (
    HELD_OUT,
    REFERENCE,
    SAMPLES,
    Request,
    check_request,
    check_stored,
    needed_forms,
    reference_features,
)
from torchtitan.evaluation.references import ImagesReference, Reference, open_reference
from torchtitan.evaluation.sampling import ImageSampler
from torchtitan.features.base import ExtractorError, FeatureExtractor
from torchtitan.features.registry import open_extractor
from torchtitan.fidelity.disjoint_sets import SETS
from torchtitan.fidelity.errors import FidelityError
from torchtitan.fidelity.feature_set import FeatureSet, feature_set_of_rows
from torchtitan.fidelity.measurement import Measurement
from torchtitan.fidelity.moments import Moments, moments_of_rows
from torchtitan.pictures.grids import to_rgb
from torchtitan.programs import program
from torchtitan.statistics.interval import Interval

# Samples' numbers [B] -> their pixels uint8 [B, H, W, 3], and how many of them were not finite.
DrawPixels = Callable[[Tensor], tuple[np.ndarray, int]]
# Images of the run's split of that name. Raises EvaluationError, DatasetError.
OpenSplit = Callable[[str], ImageSet]
MOST_SPLIT_IMAGES = 100_000
# Options of scripts/evaluate.py that messages name -> keys of a configuration.
_KEYS = {
    "--allow-small": "evaluation.allow_small = true", "--held-out": "evaluation.held_out",
    "--reference": "evaluation.reference",
}  # fmt: skip


@dataclass(frozen=True)
class DrawnFeatures:
    """Features of drawn samples.

    Attributes:
        extractors: by name.
        rows: by extractor and output, float32 [N, D]; on the first rank alone.
        size: height and width of the samples.
    """

    extractors: Mapping[str, FeatureExtractor]
    rows: Mapping[tuple[str, str], np.ndarray]
    size: tuple[int, int]


class SplitReference(ImagesReference):
    """Split of the run's own data as a reference: its features are extracted by the run, and stay on the first rank."""

    def __init__(self, images: ImageSet) -> None:
        """Raises EvaluationError: it has too many images."""
        super().__init__(images)
        if len(images) > MOST_SPLIT_IMAGES:
            raise EvaluationError(
                f"the split has {len(images):,} images, more than the {MOST_SPLIT_IMAGES:,} whose features a "
                f"run extracts (make a reference once by {program('evaluate')} reference)"
            )
        self.extracted = False  # on all ranks
        self._kept: dict[tuple[str, str, str], np.ndarray | Moments] = {}

    def keep(self, extractor: str, output: str, form: str, rows: np.ndarray) -> None:
        """Keep features of an extractor's output in a form that is needed."""
        self._kept[extractor, output, form] = rows if form == "rows" else moments_of_rows(rows)

    def stored(self, extractor: FeatureExtractor, output: str, form: str) -> bool:
        return True  # before they are needed

    def moments(self, extractor: FeatureExtractor, output: str) -> Moments:
        return cast(Moments, self._kept[extractor.name, output, "moments"])

    def rows(self, extractor: FeatureExtractor, output: str) -> np.ndarray:
        return cast(np.ndarray, self._kept[extractor.name, output, "rows"])


class SampleMetrics:
    """Metrics of `[evaluation]`; every method is collective.

    Extractors and made references are opened for each measurement and closed after it: they take no memory from training.
    """

    def __init__(
        self, config: EvaluationConfig, device: torch.device, size: tuple[int, int] | None, group: dist.ProcessGroup | None,
        open_split: OpenSplit | None = None, num_classes: int = 0,
    ) -> None:  # fmt: skip
        """
        Args:
            config: with metrics that can be measured.
            device: of the extractors.
            size: height and width of the samples; None: not known yet.
            group: of all ranks, for CPU tensors, with a timeout above the duration of a measurement; None: one process.
            open_split: for references that are splits of the run's data.
            num_classes: classes that samples are drawn for; 0: none.

        Raises:
            EvaluationError: an extractor or a reference cannot be opened, or does not hold what a metric needs; on every
                rank.
        """
        self._config, self._device, self._group = config, device, group
        self._request = Request(
            tuple(config.metrics), config.extractor, allow_small=config.allow_small, device=str(device)
        )
        self._rank, self._ranks = (dist.get_rank(), dist.get_world_size()) if group else (0, 1)
        self._open_split, self._num_classes = open_split, num_classes
        self._splits: dict[str, SplitReference] = {}
        on_all_ranks(lambda: self._check(size), (EvaluationError,), group)

    @property
    def count(self) -> int:
        """Number of samples of a measurement."""
        return self._config.count

    def extract(self, draw: DrawPixels, batch_size: int) -> DrawnFeatures:
        """Draw the samples and extract their features, each rank its share.

        Args:
            draw: called with equally many numbers on every rank.
            batch_size: samples at a time on each rank.

        Raises:
            EvaluationError: on every rank.
        """
        extractors = on_all_ranks(self._extractors, (EvaluationError,), self._group)
        for role, split in self._splits.items():
            if not split.extracted:
                self._extract_split(role, split, batch_size, extractors)
        rows, size = self._draw(draw, self.count, batch_size, extractors)
        return DrawnFeatures(extractors, rows, size)

    def measure(self, drawn: DrawnFeatures, classes: Tensor | None = None) -> Measurement:
        """Measure drawn samples on the first rank, while the others wait.

        Args:
            drawn: features of the samples.
            classes: that they were drawn for, int64 [N].

        Returns:
            the values of all metrics, with the metrics' notes, on every rank.

        Raises:
            EvaluationError: on every rank.
        """
        return from_first_rank(self._measure, drawn, classes, group=self._group)

    def _check(self, size: tuple[int, int] | None) -> None:
        with _in_keys():
            extractors, references = self._extractors(), self._references()
            check_request(
                self._request, extractors, self.count, size, references.get(REFERENCE), references.get(HELD_OUT)
            )
            for name, extractor in extractors.items():
                for role, reference in references.items():
                    check_stored(self._request, name, extractor, reference, role)
            known = extractors[self._request.extractor].dims["logits"] if "accuracy" in self._request.metrics else 0
            if known and known != self._num_classes:
                raise EvaluationError(
                    f"accuracy: {self._config.extractor} knows {known} classes, the data have {self._num_classes} (leave it out)"
                )

    def _extractors(self) -> dict[str, FeatureExtractor]:
        try:
            with torch.random.fork_rng(devices=[]):  # networks are filled with random numbers before their weights
                return {name: open_extractor(name, None, self._device) for name in self._request.extractors()}
        except ExtractorError as error:
            raise EvaluationError(f"evaluation.extractor: {error}") from error

    def _references(self) -> dict[str, Reference]:
        given = ((REFERENCE, self._config.reference, "reference"), (HELD_OUT, self._config.held_out, "held_out"))
        return {role: self._reference(role, text, key) for role, text, key in given if text}

    def _reference(self, role: str, text: str, key: str) -> Reference:
        if text not in SPLITS or self._open_split is None:
            return open_reference(text, f"evaluation.{key}")
        if role not in self._splits:
            try:
                self._splits[role] = SplitReference(self._open_split(text))
            except (EvaluationError, DatasetError) as error:
                raise EvaluationError(f"evaluation.{key}: {error}") from error
        return self._splits[role]

    def _extract_split(
        self, role: str, split: SplitReference, batch_size: int, extractors: Mapping[str, FeatureExtractor]
    ) -> None:
        images = cast(ImageSet, split.images)
        problems: list[str] = []

        def read(numbers: Tensor) -> tuple[np.ndarray, int]:
            first = int(numbers[0])
            try:
                return images.pixels(range(first, int(numbers.max()) + 1))[numbers.numpy() - first], 0
            except EvaluationError as error:  # the other ranks wait for this one's features
                problems.append(str(error))
                return np.zeros((len(numbers), *images.size, 3), np.uint8), 0

        found, _ = self._draw(read, len(images), batch_size, extractors)
        if problems := list(itertools.chain(*of_all_ranks(problems, self._group))):
            raise EvaluationError(problems[0])
        for (name, output), rows in found.items():
            for needed, form in needed_forms(self._request, name, role):
                if needed == output:
                    split.keep(extractors[name].name, output, form, rows)
        split.extracted = True

    def _draw(
        self, draw: DrawPixels, count: int, batch_size: int, extractors: Mapping[str, FeatureExtractor]
    ) -> tuple[dict[tuple[str, str], np.ndarray], tuple[int, int]]:
        share = math.ceil(count / self._ranks)
        needed = list(dict.fromkeys(
            (name, metric.output) for name in extractors for _, metric in self._request.of(name)
        ))
        rows = {
            key: np.empty((self._ranks * share, extractors[key[0]].dims[key[1]]), np.float32)
            for key in (needed if self._rank == 0 else ())
        }
        damaged, size = 0, (0, 0)
        for places in torch.arange(share).split(batch_size):  # as many on every rank
            pixels, not_finite = draw((places + self._rank * share).clamp(max=count - 1))
            damaged, size = damaged + not_finite, (pixels.shape[1], pixels.shape[2])
            images = torch.from_numpy(np.ascontiguousarray(pixels.transpose(0, 3, 1, 2)))  # [B, 3, H, W]
            features = {name: extractor.extract(images) for name, extractor in extractors.items()}
            for name, output in needed:
                for rank, part in enumerate(self._gathered(features[name][output].cpu())):
                    rows[name, output][rank * share + places.numpy()] = part.numpy()
        if total := sum(of_all_ranks(damaged, self._group)):
            raise EvaluationError(f"{total} of {count} samples have values that are not finite")
        return {key: values[:count] for key, values in rows.items()}, size

    def _gathered(self, part: Tensor) -> list[Tensor]:
        """Parts of all ranks, on the first; nothing on the others."""
        if self._ranks == 1:
            return [part]
        parts = [torch.empty_like(part) for _ in range(self._ranks)] if self._rank == 0 else None
        dist.gather(part.contiguous(), parts, dst=0, group=self._group)
        return parts or []

    def _measure(self, drawn: DrawnFeatures, classes: Tensor | None) -> Measurement:
        references = self._references()
        for place in (each.place for each in references.values() if each.size not in (None, drawn.size)):
            height, width = drawn.size
            raise EvaluationError(f"{place}: has images of another size than the samples' {width} x {height} pixels")
        request, found = self._request, dict[str, Measurement]()
        for name, extractor in drawn.extractors.items():
            samples = self._sample_set(name, drawn, None if classes is None else classes.numpy())
            compared = {
                role: reference_features(request, name, extractor, reference, role) for role, reference in references.items()
            }
            options = request.options(compared.get(HELD_OUT))
            for metric_name, metric in request.of(name):
                try:
                    found[metric_name] = metric.measure(samples, compared.get(REFERENCE), options)
                except FidelityError as error:
                    raise EvaluationError(f"{metric_name}: {error}") from error
        values: dict[str, Interval] = {}
        for metric_name in request.metrics:
            values |= found[metric_name].values
        return Measurement(values, [note for metric_name in request.metrics for note in found[metric_name].notes])

    def _sample_set(self, name: str, drawn: DrawnFeatures, classes: np.ndarray | None) -> FeatureSet:
        rows = {output: values for (extractor, output), values in drawn.rows.items() if extractor == name}
        in_sets = {metric.output for _, metric in self._request.of(name) if metric.samples == "sets"}
        moments = feature_set_of_rows(
            SAMPLES, name, {output: rows[output] for output in rows if output in in_sets}, min(SETS, self.count // 2)
        )
        return dataclasses.replace(moments, rows=rows, classes=classes)


def measure_samples(
    metrics: SampleMetrics, sampler: ImageSampler, choices: Tensor, seed: int, *, batch_size: int,
    decoder: LatentDecoder | None = None, sharded: bool = False, **method: Any,
) -> Measurement:  # fmt: skip
    """Metrics of newly drawn samples; collective.

    Args:
        metrics, sampler: of the run.
        choices: conditions of the samples, int64 [N].
        seed, batch_size, sharded, method: as in `ImageSampler.draw`.
        decoder: of latents; None for a model of images.

    Raises:
        EvaluationError: on every rank.
    """
    with (
        sampler.drawing(seed, purpose="evaluation", sharded=sharded, **method) as draw_batch,
        decoder.on_device() if decoder else nullcontext(),
    ):

        def draw(numbers: Tensor) -> tuple[np.ndarray, int]:
            images = draw_batch(choices[numbers], numbers)
            images = decoder.decode_alone(images) if decoder else images.cpu()
            return to_rgb(images.numpy()), int((~images.isfinite()).flatten(1).any(dim=1).sum())

        drawn = metrics.extract(draw, batch_size)
    return metrics.measure(drawn, choices)


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
