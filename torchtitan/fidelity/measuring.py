"""Measure samples by metrics of their features: what is needed, from which extractors, and the values."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch.distributed as dist
from tqdm import tqdm

from torchtitan.errors import EvaluationError
from torchtitan.fidelity.extraction import BATCH_SIZE, Rows, extract_images
from torchtitan.fidelity.feature_extractor import FeatureExtractor
from torchtitan.fidelity.feature_set import FeatureSet
from torchtitan.fidelity.kid import SUBSET_SIZE
from torchtitan.fidelity.measurement import Form, Measurement, Metric, Options
from torchtitan.fidelity.metrics import METRICS
from torchtitan.fidelity.moments import moments_of_rows
from torchtitan.fidelity.references import Reference

DEFAULT_EXTRACTOR = "inception"
FEWEST = 4  # samples: two groups with a covariance each, for the jackknife
_FEWEST_ROWS = {"kid": SUBSET_SIZE}  # of metrics of rows, by their published protocol


@dataclass(frozen=True)
class Request:
    """Request for metrics.

    Attributes:
        extractor: of those that are defined for any.
        allow_small: measure sets that are too small for a metric's protocol or rank, with a note, instead of refusing.
    """

    metrics: tuple[str, ...]
    extractor: str = DEFAULT_EXTRACTOR
    allow_small: bool = False
    seed: int = 0
    device: str = "cpu"

    def extractor_of(self, metric: str) -> str:
        return METRICS[metric].extractor or self.extractor

    def extractors(self) -> list[str]:
        """Names of the extractors that are needed, each once."""
        return list(dict.fromkeys(map(self.extractor_of, self.metrics)))

    def outputs(self) -> dict[str, list[str]]:
        """Outputs of each extractor that metrics read of the samples."""
        return {name: list(dict.fromkeys(metric.output for _, metric in self.of(name))) for name in self.extractors()}

    def reference_forms(self, extractor: str, *, held_out: bool = False) -> list[tuple[str, Form]]:
        """Outputs and forms of a reference's features that the metrics of an extractor read, each once."""
        forms: list[tuple[str, Form]] = []
        for _, metric in self.of(extractor):
            if held_out and metric.needs_held_out:
                forms.append((metric.output, "rows"))
            elif not held_out and metric.reference:
                forms.append((metric.output, metric.reference))
        return list(dict.fromkeys(forms))

    def options(self, held_out: FeatureSet | None = None) -> Options:
        return Options(seed=self.seed, device=self.device, held_out=held_out)

    def settings(self) -> dict[str, Any]:
        """Settings that values depend on, for JSON."""
        options = self.options()
        names = [each.name for each in fields(options) if each.name not in ("held_out", "device")]
        return {"allow_small": self.allow_small} | {name: getattr(options, name) for name in names}

    def of(self, extractor: str) -> Iterator[tuple[str, Metric]]:
        """Metrics of an extractor's features, with their names."""
        return ((name, METRICS[name]) for name in self.metrics if self.extractor_of(name) == extractor)


def known_metrics(names: Sequence[str]) -> tuple[str, ...]:
    """Names of metrics, checked. Raises EvaluationError: one is unknown or given twice."""
    for name in names:
        if name not in METRICS:
            raise EvaluationError(f"--metrics: no metric is called {name[:40]!r} (there are: {', '.join(METRICS)})")
    if len(set(names)) < len(names):
        twice = next(name for name in names if list(names).count(name) > 1)
        raise EvaluationError(f"--metrics: {twice} is given twice (leave it out once)")
    return tuple(names)


def check_classes(request: Request, extractors: Mapping[str, FeatureExtractor], num_classes: int | None) -> None:
    """Check that the classifier of `accuracy`, if asked for, knows as many classes as samples are of (None: not known).

    Raises:
        EvaluationError: it knows others.
    """
    if num_classes is None or "accuracy" not in request.metrics:
        return
    if (known := extractors[request.extractor].dims["logits"]) != num_classes:
        text = f"{request.extractor} knows {known} classes, and the samples are of {num_classes or 'none'}"
        raise EvaluationError(f"accuracy: {text} (leave it out)")


def check_request(
    request: Request, extractors: Mapping[str, FeatureExtractor], count: int, size: tuple[int, int] | None,
    reference: Reference | None, held_out: Reference | None,
) -> None:  # fmt: skip
    """Check that samples can be measured, before the first is drawn or read.

    Args:
        extractors: by name, those that the request needs.
        size: their height and width; None: not known yet.

    Raises:
        EvaluationError: with what is missing, too small or of another size.
    """
    if count < FEWEST:
        raise EvaluationError(f"{count} samples are too few for any metric (take at least {FEWEST})")
    if reference is None and (needing := [name for name in request.metrics if METRICS[name].reference]):
        raise EvaluationError(f"--reference: not given, and needed by {', '.join(needing)}")
    if held_out is None and any(METRICS[name].needs_held_out for name in request.metrics):
        raise EvaluationError("--held-out: not given, and needed by memorisation: images that were not trained on")
    options = request.options()
    fewest_held_out = math.ceil(1 / options.held_out_share)
    for name in request.metrics:
        if name == "is" and count < 2 * options.splits:
            raise EvaluationError(f"is: {count} samples are too few (take at least {2 * options.splits}, or leave is out)")
        metric, extractor = METRICS[name], extractors[request.extractor_of(name)]
        if held_out is not None and metric.needs_held_out and fewest_held_out > (held_out.count or fewest_held_out):
            text = f"{held_out.place}: {held_out.count} held-out images are too few"
            raise EvaluationError(f"{name}: {text} (take at least {fewest_held_out}, or leave {name} out)")
        if metric.output not in extractor.dims:
            there = ", ".join(extractor.dims)
            raise EvaluationError(f"{name}: reads {metric.output}, and {extractor.name} gives {there} (leave it out)")
        if reference is not None and metric.reference is not None:
            reference.check(extractor.name, metric.output, metric.reference, name)
        if held_out is not None and metric.needs_held_out:
            held_out.check(extractor.name, metric.output, "rows", f"{name} (--held-out)")
            if reference is not None and not (reference.images or reference.holds_all_rows(extractor.name, metric.output)):
                raise EvaluationError(
                    f"{name}: {reference.place} keeps rows of some of its {reference.count} images, the nearest may be missing "
                    "(give the images themselves)"
                )
        if not request.allow_small:
            _refuse_small(name, metric, extractor, count, reference)
    for other in (reference, held_out):
        if size is not None and other is not None:
            check_size(other, size)


def check_size(reference: Reference, size: tuple[int, int]) -> None:
    """Check that a reference is of the samples' height and width. Raises EvaluationError."""
    if reference.size not in (None, size):
        height, width = reference.size or size
        raise EvaluationError(
            f"{reference.place}: images of {width} x {height} pixels, and the samples have {size[1]} x {size[0]} (give a "
            "reference of the same resolution)"
        )


def features_of_samples(rows: Rows, classes: np.ndarray | None = None) -> dict[str, FeatureSet]:
    """Feature sets of the samples' rows, by extractor."""
    of_extractor: dict[str, dict[str, np.ndarray]] = {}
    for (extractor, output), values in rows.items():
        of_extractor.setdefault(extractor, {})[output] = values
    return {extractor: FeatureSet("samples", extractor, outputs, classes=classes) for extractor, outputs in of_extractor.items()}


def reference_features(
    request: Request, extractors: Mapping[str, FeatureExtractor], reference: Reference, *, held_out: bool = False,
    batch_size: int = BATCH_SIZE, group: dist.ProcessGroup | None = None, progress: bool = False,
) -> dict[str, FeatureSet]:  # fmt: skip
    """Features of a reference that the metrics need, by extractor: those that it holds, or of its images; collective.

    Returns:
        feature sets on the first rank; nothing that can be used on the others.

    Raises:
        EvaluationError: its images cannot be read; on every rank.
    """
    forms = {name: request.reference_forms(name, held_out=held_out) for name in extractors}
    missing = {
        name: list(dict.fromkeys(output for output, form in wanted if not reference.holds(name, output, form)))
        for name, wanted in forms.items()
    }
    extracted: Rows = {}
    if any(missing.values()) and reference.images is not None:
        needed = {name: extractors[name] for name, outputs in missing.items() if outputs}
        extracted = extract_images(reference.images, needed, missing, batch_size, group, progress)
    if group and dist.get_rank():
        return {}
    found = {}
    for name, wanted in forms.items():
        rows, moments = {}, {}
        for output, form in wanted:
            held = reference.holds(name, output, form)
            if form == "rows":
                rows[output] = reference.rows(name, output) if held else extracted[name, output]
            else:
                moments[output] = reference.moments(name, output) if held else moments_of_rows(extracted[name, output])
        found[name] = FeatureSet("held-out images" if held_out else "reference", name, rows, moments)
    return found


def measure(
    request: Request, samples: Mapping[str, FeatureSet], reference: Mapping[str, FeatureSet], held_out: Mapping[str, FeatureSet]
) -> dict[str, Measurement]:
    """Measure samples by a request's metrics, in order; feature sets by extractor. Raises EvaluationError: unusable."""
    found = {}
    for name in tqdm(request.metrics, "metrics of features", unit="metric", delay=2, leave=False, disable=None):
        extractor = request.extractor_of(name)
        options = request.options(held_out.get(extractor))
        try:
            found[name] = METRICS[name].measure(samples[extractor], reference.get(extractor), options)
        except EvaluationError as error:
            raise EvaluationError(f"{name}: {error}") from error
        if others := found[name].values.keys() - METRICS[name].better.keys():
            raise EvaluationError(f"{name}: measures {', '.join(sorted(others))}, which its Metric does not name in `better`")
    return found


def _refuse_small(
    name: str, metric: Metric, extractor: FeatureExtractor, count: int, reference: Reference | None
) -> None:
    size, counts = extractor.dims[metric.output], {"samples": count}
    if reference is not None and reference.count is not None:
        counts[reference.place] = reference.count
    for place, images in counts.items():
        if images < (fewest := _FEWEST_ROWS.get(name, 0)):
            raise EvaluationError(f"{name}: {images} images ({place}) are too few (take at least {fewest}, or --allow-small)")
        if metric.reference == "moments" and images <= size:
            raise EvaluationError(
                f"{name}: a covariance of {size} features from {images} images ({place}) has rank {images - 1} at most (take "
                f"at least {size + 1} images, or --allow-small)"
            )
