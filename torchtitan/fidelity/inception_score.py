"""Inception score, over shuffled splits and over splits in file order."""

from __future__ import annotations

import itertools
import math

import numpy as np

from torchtitan.errors import EvaluationError
from torchtitan.fidelity.feature_set import FeatureSet
from torchtitan.fidelity.measurement import Measurement, Metric, Options
from torchtitan.statistics.interval import Interval, mean_interval

SHUFFLE_SEED = 2020  # of torch-fidelity
IMAGES_OF_A_SPLIT = 5000  # of ADM, which makes 10 splits of 50,000


def measure_inception_score(
    samples: FeatureSet, _reference: FeatureSet | None, output: str, options: Options
) -> Measurement:
    """Inception score exp(E KL(p(y|x) || p(y))), mean over splits that have a p(y) of their own each.

    `is` and `is_sd` are torch-fidelity's mean and standard deviation over splits of the samples in its own shuffled order;
    `is_file_order` is the mean over consecutive splits, as ADM's evaluator has it. The file's order must not matter. It
    does where samples are sorted by class: a split of few classes has few in its p(y), and the score is too low. That loss
    is exact: the mean logarithm of the splits' scores is that of all samples minus the mean KL(p_split(y) || p(y)). A
    note warns where it is more than twice that of the shuffled order.

    The intervals are Student's over the disjoint splits: another set of as many samples. The score is too low for finite
    splits, which the intervals do not cover: compare at equal numbers of samples.

    Raises:
        EvaluationError: logits of fewer than two classes, or fewer than two samples for a split.

    Source: Salimans et al. 2016, "Improved Techniques for Training GANs", section 4.
    """
    logits = samples.rows_of(output)
    if logits.shape[1] < 2:
        raise EvaluationError(f"{samples.name}: an inception score needs at least 2 classes, not {logits.shape[1]}")
    if len(logits) < 2 * options.splits:
        raise EvaluationError(f"{samples.name}: {len(logits)} images are too few for {options.splits} splits of at least 2")
    order = np.random.RandomState(SHUFFLE_SEED).permutation(len(logits))
    scores, loss = _scores_of_splits(logits, order, options.splits)
    in_order, loss_in_order = _scores_of_splits(logits, np.arange(len(logits)), options.splits)
    values = {
        "is": mean_interval(scores, options.confidence),
        "is_sd": Interval(float(np.std(scores)), count=options.splits),
        "is_file_order": mean_interval(in_order, options.confidence),
    }
    notes = []
    if loss_in_order > 2 * loss + 0.01:
        lost = 100 * (1 - math.exp(loss - loss_in_order))
        notes.append(
            f"{samples.name}: consecutive images are of few classes (sorted?), so that is_file_order is {lost:.0f} % too low"
        )
    if len(logits) < IMAGES_OF_A_SPLIT * options.splits:
        notes.append(
            f"{samples.name}: splits of {len(logits) // options.splits} images; published scores have {IMAGES_OF_A_SPLIT:,}"
        )
    return Measurement(values, notes)


def _scores_of_splits(logits: np.ndarray, order: np.ndarray, splits: int) -> tuple[list[float], float]:
    """Score of each split, and the mean KL divergence of the splits' class distributions from that of all samples."""
    edges = [number * len(order) // splits for number in range(splits + 1)]
    divergences, distributions = [], []
    for first, end in itertools.pairwise(edges):
        shifted = logits[np.sort(order[first:end])].astype(np.float64)  # [N, classes]
        shifted -= shifted.max(axis=1, keepdims=True)
        log_p = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
        p = np.exp(log_p)
        distributions.append(p.mean(axis=0))
        divergences.append(float((p * (log_p - _log(distributions[-1]))).sum(axis=1).mean()))
    sizes = np.diff(edges) / len(order)
    of_all = sizes @ np.array(distributions)
    loss = sum(float((each * (_log(each) - _log(of_all))).sum()) for each in distributions) / splits
    return [math.exp(each) for each in divergences], loss


def _log(p: np.ndarray) -> np.ndarray:
    """Logarithm that stays finite where a class has no probability at all, so that 0 log 0 is 0."""
    return np.log(np.maximum(p, np.finfo(np.float64).tiny))


INCEPTION_SCORE = Metric(
    "Inception score", "logits", None, {"is": "higher", "is_sd": None, "is_file_order": "higher"}, measure_inception_score
)
