"""Share of samples that are copies of training images, by a threshold that held-out images calibrate."""

from __future__ import annotations

import math

import numpy as np

from torchtitan.errors import EvaluationError
from torchtitan.fidelity.feature_set import FeatureSet
from torchtitan.fidelity.kid import check_same_size
from torchtitan.fidelity.measurement import Measurement, Metric, Options
from torchtitan.fidelity.pairs import squared_neighbour_distances
from torchtitan.statistics.interval import Interval, binomial_interval

_DRAWS = 1000  # of the bootstrap
_EQUAL = 1e-5  # distance, of the features' norm, within which they are equal but for rounding in another batch


def measure_memorisation(
    samples: FeatureSet, reference: FeatureSet | None, output: str, options: Options
) -> Measurement:
    """Share of samples nearer to a training image than all but `held_out_share` of the held-out images are.

    The reference is the training set, with the rows of all images that the generator was trained on. Without memorising,
    the share is about `held_out_share` (1 %). It is a comparison and no proof: samples of a typical kind lie near some
    training image without being a copy.

    The interval is the bootstrap's percentile interval, which draws held-out images (and so the threshold) and samples
    anew; where Wilson's interval at the threshold found is wider, as at shares of 0 and 1, it is that. The training set
    is fixed.

    Returns:
        memorised: the share; memorised_held_out: the same of the held-out images, `held_out_share` but for its steps;
        memorised_threshold: Euclidean distance of features.

    Raises:
        EvaluationError: held-out images too few for their share, or among the training images; features that differ in size.

    Source of the idea: Meehan et al. 2020, "A Three Sample Hypothesis Test for Evaluating Generative Models", section 2,
    which compares the same distances by ranks.
    """
    assert reference is not None and options.held_out is not None
    training, held_out = reference.rows_of(output), options.held_out.rows_of(output)
    fewest = math.ceil(1 / options.held_out_share)
    if len(held_out) < fewest:
        raise EvaluationError(
            f"{options.held_out.name}: {len(held_out)} images cannot place a threshold below which "
            f"{100 * options.held_out_share:g} % of them lie: take at least {fewest}"
        )
    of_samples, of_held_out = (_nearest(each, training, options.device) for each in (samples.rows_of(output), held_out))
    threshold = float(np.quantile(of_held_out, options.held_out_share))
    if threshold <= _EQUAL * float(np.sqrt(np.mean(np.square(training, dtype=np.float64).sum(axis=1)))):
        raise EvaluationError(
            f"{options.held_out.name}: more than {100 * options.held_out_share:g} % of them are images of the reference, so "
            "that no copy is nearer (give images that are not in the reference)"
        )
    copies = int(np.searchsorted(of_samples, threshold))
    ends = _bootstrap(of_samples, of_held_out, options)
    at_threshold = binomial_interval(copies, len(of_samples), options.confidence)
    lower, upper = min(ends[0], at_threshold.lower), max(ends[1], at_threshold.upper)
    return Measurement({
        "memorised": Interval(copies / len(of_samples), lower, upper, len(of_samples), options.confidence),
        "memorised_held_out": Interval(float(np.mean(of_held_out < threshold)), count=len(of_held_out)),
        "memorised_threshold": Interval(threshold, count=len(of_held_out)),
    })


def _nearest(rows: np.ndarray, training: np.ndarray, device: str) -> np.ndarray:
    """Distances to the nearest training image, ascending."""
    check_same_size(rows, training)
    return np.sort(squared_neighbour_distances(rows, training, 1, device).sqrt().numpy())  # [N]


def _bootstrap(of_samples: np.ndarray, of_held_out: np.ndarray, options: Options) -> tuple[float, float]:
    generator = np.random.default_rng(options.seed)
    drawn = generator.choice(of_held_out, (_DRAWS, len(of_held_out)))
    thresholds = np.quantile(drawn, options.held_out_share, axis=1)
    shares = np.searchsorted(of_samples, thresholds) / len(of_samples)
    # The number of a drawn set's samples below a threshold is binomial.
    shares = generator.binomial(len(of_samples), shares) / len(of_samples)
    lower, upper = np.quantile(shares, [0.5 - 0.5 * options.confidence, 0.5 + 0.5 * options.confidence])
    return float(lower), float(upper)


MEMORISATION = Metric(
    "Memorisation", "pooled", "rows", {"memorised": "lower", "memorised_held_out": None, "memorised_threshold": None},
    measure_memorisation, needs_held_out=True,
)  # fmt: skip
