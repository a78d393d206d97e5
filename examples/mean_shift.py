"""A metric, and a callback: the distance between mean features, and a line where the loss has doubled.

    train.py digits --job.name shift --job.plugins examples/mean_shift.py --evaluation.metrics mean_shift,accuracy,memorisation
"""

import logging
from collections.abc import Mapping

import numpy as np

from torchtitan.fidelity.feature_set import FeatureSet
from torchtitan.fidelity.measurement import Measurement, Metric, Options
from torchtitan.fidelity.metrics import METRICS
from torchtitan.statistics.interval import Interval
from torchtitan.training.metric_sinks import CALLBACKS

LOSS = "loss_metrics/global_avg_loss"


def measure_mean_shift(samples: FeatureSet, reference: FeatureSet | None, output: str, options: Options) -> Measurement:
    """Euclidean distance between the mean features of samples and reference: the first term of a Fréchet distance."""
    assert reference is not None  # the metric says that it needs rows
    shift = samples.rows_of(output).mean(0) - reference.rows_of(output).mean(0)
    return Measurement({"mean_shift": Interval(float(np.linalg.norm(shift)))})


class Doubling:
    """Callback that reports a loss above twice the lowest so far; it gets every point that metrics.jsonl gets."""

    def __init__(self) -> None:
        self.step, self.lowest = 0, float("inf")

    def __call__(self, step: int, metrics: Mapping[str, float]) -> None:
        if step < self.step:  # of the next run of this process
            self.lowest = float("inf")
        self.step = step
        loss = metrics.get(LOSS, self.lowest)
        self.lowest = min(self.lowest, loss)
        if loss > 2 * self.lowest:
            logging.getLogger(__name__).warning(f"step {step}: loss {loss:.3g} is twice the lowest, {self.lowest:.3g}")


METRICS["mean_shift"] = Metric("Distance of mean features", "pooled", "rows", {"mean_shift": "lower"}, measure_mean_shift)
CALLBACKS["doubling"] = Doubling()
