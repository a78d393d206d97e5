"""Improved precision and recall, density and coverage, from nearest neighbours among feature vectors."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from torchtitan.errors import EvaluationError
from torchtitan.fidelity.feature_set import FeatureSet
from torchtitan.fidelity.kid import check_same_size
from torchtitan.fidelity.measurement import Measurement, Metric, Options
from torchtitan.fidelity.pairs import row_blocks, squared_distances, squared_neighbour_distances
from torchtitan.statistics.interval import binomial_interval, mean_interval


def measure_prdc(samples: FeatureSet, reference: FeatureSet | None, output: str, options: Options) -> Measurement:
    """Precision, recall, density and coverage in balls around images that reach to their k-th nearest neighbour.

    precision: share of samples inside a ball of a reference image. recall: share of reference images inside a ball of a
    sample. density: number of balls of reference images that a sample is inside, over k, mean over samples; about 1 where
    both sets have one distribution, and not bounded by it. coverage: share of balls of reference images with a sample
    inside. A set's neighbours are those in itself without the image, and a ball has its surface.

    By default k = 3, up to 50,000 samples and 10,000 reference images, as ADM's evaluator has them; of more, a part is
    drawn by `options.seed`. All four depend on these numbers.

    Intervals: Wilson's of a share, and Student's of a mean over samples for density. Those of precision and density cover
    that samples are drawn, with the reference fixed. Those of recall and coverage cover that reference images are drawn,
    with the samples' balls fixed; that k-th neighbours come nearer as sets grow is in none.

    Raises:
        EvaluationError: a set has no more than k rows.

    Source: Kynkäänniemi et al. 2019, "Improved Precision and Recall Metric for Assessing Generative Models", section 3;
    Naeem et al. 2020, "Reliable Fidelity and Diversity Metrics for Generative Models", equations 3 and 4.
    """
    assert reference is not None
    x = _at_most(options.prdc_samples, samples.rows_of(output), options.seed)
    y = _at_most(options.prdc_reference, reference.rows_of(output), options.seed)
    check_same_size(x, y)
    k = options.neighbours
    for each, rows in ((samples, x), (reference, y)):
        if len(rows) <= k:
            raise EvaluationError(f"{each.name}: {len(rows)} images have no {k}-th nearest neighbour: take at least {k + 1}")
    balls_around, is_recalled, is_covered = _memberships(x, y, k, options.device)
    values = {
        "precision": binomial_interval(int((balls_around > 0).sum()), len(x), options.confidence),
        "recall": binomial_interval(int(is_recalled.sum()), len(y), options.confidence),
        "density": mean_interval((balls_around.double() / k).tolist(), options.confidence),
        "coverage": binomial_interval(int(is_covered.sum()), len(y), options.confidence),
    }
    notes = []
    if len(x) < options.prdc_samples or len(y) < options.prdc_reference:
        notes.append(
            f"precision, recall, density and coverage of {len(x):,} samples and {len(y):,} reference images; "
            f"published ones are of {options.prdc_samples:,} and {options.prdc_reference:,}"
        )
    return Measurement(values, notes)


def _memberships(x: np.ndarray, y: np.ndarray, k: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Number of balls of reference images around each sample [N]; whether each reference image is inside a sample's ball
    [M]; whether a sample is inside each reference image's ball [M]."""
    radii_x, radii_y = (squared_neighbour_distances(rows, rows, k + 1, device).to(device) for rows in (x, y))
    balls_around = torch.zeros(len(x), dtype=torch.int64, device=device)
    is_recalled, is_covered = torch.zeros((2, len(y)), dtype=torch.bool, device=device)
    origin = y.mean(axis=0, dtype=np.float64)
    for place, block in row_blocks(x, device, origin):
        for other_place, other in row_blocks(y, device, origin):
            squared = squared_distances(block, other)  # [N, M]
            inside = squared <= radii_y[other_place]
            balls_around[place] += inside.sum(dim=1)
            is_covered[other_place] |= inside.any(dim=0)
            is_recalled[other_place] |= (squared <= radii_x[place, None]).any(dim=0)
    return balls_around.cpu(), is_recalled.cpu(), is_covered.cpu()


def _at_most(count: int, rows: np.ndarray, seed: int) -> np.ndarray:
    if len(rows) <= count:
        return rows
    return rows[np.sort(np.random.default_rng(seed).choice(len(rows), count, replace=False))]


PRDC = Metric(
    "Precision, recall, density, coverage", "pooled", "rows",
    {"precision": "higher", "recall": "higher", "density": "higher", "coverage": "higher"}, measure_prdc,
)  # fmt: skip
