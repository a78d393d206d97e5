"""Measure samples by metrics of their features: what is needed, from which extractors, and the results."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from torchtitan.distributed.collectives import from_first_rank
from torchtitan.errors import EvaluationError
from torchtitan.evaluation.feature_files import (
    BATCH_SIZE,
    CHUNK,
    FeatureFolder,
    HashedImages,
    extract_features,
    hash_images,
)
from torchtitan.evaluation.image_sets import ImageSet
from torchtitan.evaluation.references import Form, MadeReference, Reference
from torchtitan.features.base import FeatureExtractor
from torchtitan.fidelity.disjoint_sets import SETS, MomentsOfSets, set_numbers
from torchtitan.fidelity.errors import FidelityError
from torchtitan.fidelity.feature_set import FeatureSet
from torchtitan.fidelity.kid import SUBSET_SIZE
from torchtitan.fidelity.measurement import Measurement, Options
from torchtitan.fidelity.metrics import METRICS, Metric
from torchtitan.fidelity.moments import Moments, MomentsAccumulator
from torchtitan.programs import program

SAMPLES, REFERENCE, HELD_OUT = "samples", "reference", "held-out images"
DEFAULT_EXTRACTOR = "inception"
FEWEST = 4  # samples of a set: two halves with a covariance each, for the jackknife
# Metrics of covariances of parts of the samples -> number of the parts.
_PARTS = {"fd_inf": SETS}
# Metrics of rows -> the fewest samples of their published protocol.
_FEWEST_ROWS = {"kid": SUBSET_SIZE}


@dataclass(frozen=True)
class Request:
    """Request for metrics.

    Attributes:
        metrics: names, each once.
        extractor: of those that are defined for any.
        sets: disjoint sets of samples whose spread is measured too; 1: none.
        allow_small, seed, device: as of Options.
        batch_size: images at a time, of extraction.
    """

    metrics: tuple[str, ...]
    extractor: str = DEFAULT_EXTRACTOR
    sets: int = 1
    allow_small: bool = False
    seed: int = 0
    device: str = "cpu"
    batch_size: int = BATCH_SIZE

    def extractor_of(self, metric: str) -> str:
        return METRICS[metric].extractor or self.extractor

    def extractors(self) -> list[str]:
        """Names of the extractors that are needed, each once."""
        return list(dict.fromkeys(map(self.extractor_of, self.metrics)))

    def needs_reference(self) -> bool:
        return any(METRICS[name].reference for name in self.metrics)

    def needs_held_out(self) -> bool:
        return any(METRICS[name].needs_held_out for name in self.metrics)

    def options(self, held_out: FeatureSet | None = None) -> Options:
        return Options(allow_small=self.allow_small, seed=self.seed, device=self.device, held_out=held_out)

    def settings(self) -> dict[str, Any]:
        """Settings that values depend on, for JSON."""
        options = self.options()
        names = [each.name for each in fields(options) if each.name not in ("held_out", "device")]
        return {name: getattr(options, name) for name in names}

    def of(self, extractor: str) -> Iterator[tuple[str, Metric]]:
        """Metrics of an extractor's features, with their names."""
        return ((name, METRICS[name]) for name in self.metrics if self.extractor_of(name) == extractor)


@dataclass(frozen=True)
class Result:
    """Result of a metric.

    Attributes:
        metric: its name.
        extractor: record of its extractor.
        measurement: of all samples.
        sets: of each disjoint set of samples, if asked for.
        set_images: images in the smallest of them.
    """

    metric: str
    extractor: Mapping[str, Any]
    measurement: Measurement
    sets: tuple[Measurement, ...] = ()
    set_images: int = 0


@dataclass
class Compared:
    """Images that are compared, and the hashes of those that are extracted; None: not given, or statistics only.

    Attributes:
        samples: to be judged.
        reference: that they are judged by.
        held_out: for memorisation.
        hashed: by SAMPLES, REFERENCE, HELD_OUT.
    """

    samples: ImageSet
    reference: Reference | None = None
    held_out: Reference | None = None
    hashed: dict[str, HashedImages] = field(default_factory=dict)

    def references(self) -> Iterator[tuple[str, Reference]]:
        for name, reference in ((REFERENCE, self.reference), (HELD_OUT, self.held_out)):
            if reference is not None:
                yield name, reference


def check_request(
    request: Request, extractors: Mapping[str, FeatureExtractor], count: int, size: tuple[int, int] | None,
    reference: Reference | None, held_out: Reference | None,
) -> None:  # fmt: skip
    """Check that samples can be measured, before the first is drawn or read.

    Args:
        request: the metrics.
        extractors: by name, those that it needs.
        count: number of samples.
        size: their height and width; None: not known yet.
        reference, held_out: to compare with.

    Raises:
        EvaluationError: with what is missing, too small or of another size.
    """
    if count < FEWEST:
        raise EvaluationError(f"{count} samples are too few for any metric (take at least {FEWEST})")
    if request.sets < 1 or count < FEWEST * request.sets:
        raise EvaluationError(
            f"--sets: {request.sets} disjoint sets of at least {FEWEST} images cannot be made of {count}"
        )
    if request.needs_reference() and reference is None:
        raise EvaluationError(f"--reference: not given, and needed by {_those(request, 'reference')}")
    if request.needs_held_out() and held_out is None:
        raise EvaluationError("--held-out: not given, and needed by memorisation: images that were not trained on")
    for name in request.metrics:
        metric, extractor = METRICS[name], extractors[request.extractor_of(name)]
        if metric.output not in extractor.dims:
            there = ", ".join(extractor.dims)
            raise EvaluationError(f"{name}: reads {metric.output}, and {extractor.name} gives {there} (leave it out)")
        if reference is not None and metric.reference is not None:
            reference.check(extractor, metric.output, metric.reference, name)
        if held_out is not None and metric.needs_held_out:
            held_out.check(extractor, metric.output, "rows", f"{name} (--held-out)")
            _refuse_partial(name, reference, extractor, metric.output)
        _refuse_small(name, metric, extractor, count // request.sets, reference, request.allow_small)
    for other in (reference, held_out):
        if other is not None and size is not None and other.size not in (None, size):
            height, width = other.size or size
            raise EvaluationError(
                f"{other.place}: images of {width} x {height} pixels, and the samples have {size[1]} x {size[0]} (give a "
                "reference of the same resolution)"
            )


def hash_compared(
    request: Request, extractors: Mapping[str, FeatureExtractor], compared: Compared, group: dist.ProcessGroup | None,
    progress: bool = False, chunk: int = CHUNK,
) -> None:  # fmt: skip
    """Hash the images that have to be extracted; collective. Raises EvaluationError."""
    compared.hashed[SAMPLES] = hash_images(compared.samples, group, progress, chunk)
    for name, reference in compared.references():
        if reference.images is not None and any(
            _to_extract(request, key, extractor, name, reference) for key, extractor in extractors.items()
        ):
            compared.hashed[name] = hash_images(reference.images, group, progress, chunk)


def measure(
    request: Request, extractors: Mapping[str, FeatureExtractor], compared: Compared, cache: Path,
    group: dist.ProcessGroup | None = None, progress: bool = False,
) -> list[Result]:  # fmt: skip
    """Extract what is missing in the cache, and measure; called by every rank, the results are the first's.

    Args:
        request: the metrics, checked.
        extractors: by name, each on this rank's device.
        compared: hashed images and references.
        cache: folder of features.
        group, progress: as of `extract_features`.

    Returns:
        a result per metric, in the request's order; on other ranks than the first nothing.

    Raises:
        EvaluationError, Busy: on every rank; ExtractionFailed: on one.
    """
    found: dict[str, Result] = {}
    for name, extractor in extractors.items():
        folder = FeatureFolder(cache, extractor)
        with ExitStack() as stack:
            stack.enter_context(folder.opened(group))
            outputs = sorted({metric.output for _, metric in request.of(name)})
            extract_features(compared.hashed[SAMPLES], outputs, folder, request.batch_size, group, progress)
            for role, reference in compared.references():
                if wanted := _to_extract(request, name, extractor, role, reference):
                    extract_features(compared.hashed[role], wanted, folder, request.batch_size, group, progress)
            results = from_first_rank(_FirstRank(request, name, folder, compared).results, group=group)
            found |= {result.metric: result for result in results}
    return [found[name] for name in request.metrics]


class _FirstRank:
    """Arithmetic of an extractor's metrics, in one process, from the files of features."""

    def __init__(self, request: Request, name: str, folder: FeatureFolder, compared: Compared) -> None:
        self._request, self._name, self._folder, self._compared = request, name, folder, compared
        self._extractor = folder.extractor
        self._metrics = list(request.of(name))

    def results(self) -> list[Result]:
        """Results in the order of the metrics. Raises EvaluationError."""
        try:
            samples = self._samples()
            reference = self._reference(REFERENCE, self._compared.reference)
            options = self._request.options(self._reference(HELD_OUT, self._compared.held_out))
            return [self._result(name, metric, samples, reference, options) for name, metric in self._metrics]
        except FidelityError as error:
            raise EvaluationError(str(error)) from error

    def _result(
        self, name: str, metric: Metric, samples: FeatureSet, reference: FeatureSet | None, options: Options
    ) -> Result:
        whole = metric.measure(samples, reference, options)
        parts = tuple(metric.measure(part, reference, options) for part in self._parts(metric, samples))
        smallest = len(self._compared.samples) // self._request.sets if parts else 0
        return Result(name, self._extractor.record(), whole, parts, smallest)

    def _samples(self) -> FeatureSet:
        hashed = self._compared.hashed[SAMPLES]
        count = len(hashed.images)
        forms: dict[str, set[str]] = {}
        for _, metric in self._metrics:
            forms.setdefault(metric.output, set()).add(metric.samples)
        rows: dict[str, np.ndarray] = {}
        sets: dict[str, tuple[Moments, ...]] = {}
        for output, wanted in forms.items():
            size = self._extractor.dims[output]
            of_sets = self._moments_of_sets(output, count) if "sets" in wanted else None
            kept = np.empty((count, size), np.float32) if "rows" in wanted else None
            begin = 0
            for part in self._folder.rows(hashed, output):
                if of_sets is not None:
                    of_sets.add(part)
                if kept is not None:
                    kept[begin : begin + len(part)] = part
                begin += len(part)
            rows |= {output: kept} if kept is not None else {}
            sets |= {output: of_sets.moments()} if of_sets is not None else {}
        return FeatureSet(SAMPLES, self._name, rows, {}, sets)

    def _parts(self, metric: Metric, samples: FeatureSet) -> Iterator[FeatureSet]:
        """Disjoint sets of the samples, one in memory at a time."""
        hashed, sets, output = self._compared.hashed[SAMPLES], self._request.sets, metric.output
        if sets == 1:
            return
        numbers = set_numbers(len(hashed.images), sets, self._request.seed + 1)  # not those of the jackknife
        for each in range(sets):
            name = f"set {each + 1} of {sets} of the samples"
            if metric.samples == "rows":
                yield FeatureSet(name, self._name, {output: samples.rows[output][numbers == each]})
                continue
            inside, begin = numbers == each, 0
            moments = self._moments_of_sets(output, int(inside.sum()))
            for part in self._folder.rows(hashed, output):
                moments.add(part[inside[begin : begin + len(part)]])
                begin += len(part)
            yield FeatureSet(name, self._name, {}, {}, {output: moments.moments()})

    def _moments_of_sets(self, output: str, count: int) -> MomentsOfSets:
        return MomentsOfSets(self._extractor.dims[output], count, min(SETS, count // 2), self._request.seed)

    def _reference(self, role: str, reference: Reference | None) -> FeatureSet | None:
        if reference is None:
            return None
        hashed = self._compared.hashed.get(role)
        parts = None if hashed is None else partial(self._folder.rows, hashed)
        return reference_features(self._request, self._name, self._extractor, reference, role, parts)


def reference_features(
    request: Request, name: str, extractor: FeatureExtractor, reference: Reference, role: str = REFERENCE,
    extracted: Callable[[str], Iterator[np.ndarray]] | None = None,
) -> FeatureSet:  # fmt: skip
    """Features of a reference that the metrics of an extractor need, in the forms that they need.

    Args:
        request: the metrics.
        name, extractor: the extractor.
        reference: to take them from.
        role: REFERENCE or HELD_OUT.
        extracted: rows of an output of the reference's images, chunk by chunk, for what it does not store; None: there are
            none.

    Raises:
        EvaluationError: it does not store them and none were extracted, or it is damaged.
    """
    if extracted is None:
        check_stored(request, name, extractor, reference, role)
    rows: dict[str, np.ndarray] = {}
    moments: dict[str, Moments] = {}
    for output, form in needed_forms(request, name, role):
        parts = None if extracted is None or reference.stored(extractor, output, form) else extracted(output)
        if form == "rows":
            rows[output] = reference.rows(extractor, output) if parts is None else np.concatenate(list(parts))
        else:
            moments[output] = reference.moments(extractor, output) if parts is None else _moments(parts)
    return FeatureSet(role, name, rows, moments)


def check_stored(request: Request, name: str, extractor: FeatureExtractor, reference: Reference, role: str) -> None:
    """Check that a reference stores the features that the metrics of an extractor need. Raises EvaluationError."""
    for output, form in needed_forms(request, name, role):
        if not reference.stored(extractor, output, form):
            raise EvaluationError(
                f"{reference.place}: holds {reference.contents()}, and {form} of {extractor.name}'s {output} features are needed "
                f"({program('evaluate')} reference makes a reference with them)"
            )


def needed_forms(request: Request, extractor: str, role: str) -> list[tuple[str, Form]]:
    """Outputs and forms of a reference's features that the metrics of an extractor need, each once."""
    if role == HELD_OUT:
        needed: list[tuple[str, Form]] = [(metric.output, "rows") for _, metric in request.of(extractor) if metric.needs_held_out]
    else:
        needed = [(metric.output, metric.reference) for _, metric in request.of(extractor) if metric.reference]
    return list(dict.fromkeys(needed))


def _moments(parts: Iterator[np.ndarray]) -> Moments:
    first = next(parts)
    moments = MomentsAccumulator(first.shape[1])
    for part in itertools.chain([first], parts):
        moments.add(part)
    return moments.moments()


def _to_extract(
    request: Request, name: str, extractor: FeatureExtractor, role: str, reference: Reference
) -> list[str]:
    """Outputs that a reference does not store in the needed form."""
    return sorted({
        output for output, form in needed_forms(request, name, role) if not reference.stored(extractor, output, form)
    })


def _those(request: Request, attribute: str) -> str:
    return ", ".join(name for name in request.metrics if getattr(METRICS[name], attribute))


def _refuse_small(
    name: str, metric: Metric, extractor: FeatureExtractor, count: int, reference: Reference | None, allowed: bool
) -> None:
    """Refuse too few images for a covariance or a protocol before any work; the metric itself does so after it."""
    fewest = _FEWEST_ROWS.get(name, 0)
    if count < fewest and not allowed:
        raise EvaluationError(f"{name}: {count} samples of a set are too few (take at least {fewest}, or --allow-small)")
    size, counts = extractor.dims[metric.output], {}
    if metric.samples == "sets":
        parts = _PARTS.get(name, 1)
        counts["samples" if parts == 1 else f"each of {parts} parts of the samples"] = count // parts
    if metric.reference == "moments" and reference is not None and reference.count is not None:
        counts[reference.place] = reference.count
    for place, images in counts.items():
        if images <= size and not allowed:
            raise EvaluationError(
                f"{name}: a covariance of {size} features from {images} images ({place}) has rank {images - 1} at most (take "
                f"at least {size + 1} images, or --allow-small)"
            )


def _refuse_partial(name: str, reference: Reference | None, extractor: FeatureExtractor, output: str) -> None:
    if isinstance(reference, MadeReference) and not reference.keeps_all_rows(extractor, output):
        raise EvaluationError(
            f"{name}: {reference.place} keeps rows of some of its {reference.count} images, the nearest may be missing (make "
            "it with --rows all)"
        )


def known_metrics(names: Sequence[str]) -> tuple[str, ...]:
    """Names of metrics, checked. Raises EvaluationError: one is unknown or given twice."""
    for name in names:
        if name not in METRICS:
            raise EvaluationError(f"--metrics: no metric is called {name[:40]!r} (there are: {', '.join(METRICS)})")
    if len(set(names)) < len(names):
        twice = next(name for name in names if list(names).count(name) > 1)
        raise EvaluationError(f"--metrics: {twice} is given twice (leave it out once)")
    return tuple(names)
