"""Batch schedule: the global batch grows with the measured noise scale by accumulating more microbatches.

Sources. Growing the batch instead of decaying the learning rate: Smith et al., "Don't decay the learning rate,
increase the batch size", arXiv 1711.00489. The noise scale as measure of the batch: McCandlish et al., arXiv
1812.06162.
"""

import math
from typing import Any


class BatchSchedule:
    """Schedule of the global batch size as a multiple of the first one; it grows and never shrinks.

    A change is considered after `warmup` samples, and then every `interval` steps. The factor becomes the largest whole
    number whose batch is at most the lower end of the noise scale's interval, but not more than twice what it was, nor
    more than `limit`. So an unknown or uncertain noise scale leaves the batch unchanged.

    Attributes:
        factor: of the next step, an integer from 1.
    """

    def __init__(self, batch_size: int, *, limit: int, warmup: int, interval: int) -> None:
        """
        Args:
            batch_size: global, at factor 1, in samples.
            limit: largest factor, >= 1.
            warmup: samples of the run before the first change, >= 0.
            interval: steps between considered changes, >= 1.
        """
        self._batch_size, self._limit, self._warmup, self._interval = batch_size, limit, warmup, interval
        self.factor = 1
        self._considered_at: int | None = None  # step

    def update(self, step: int, samples: int, lower: float) -> None:
        """Update the factor after a step; it holds from step + 1 on.

        Args:
            step: the step just made.
            samples: of the run so far.
            lower: lower end of the whole objective's noise scale, in samples, equal on all ranks; NaN: not known.
        """
        if samples < self._warmup or (self._considered_at is not None and step - self._considered_at < self._interval):
            return
        self._considered_at = step
        if math.isfinite(lower):
            wanted = min(int(lower // self._batch_size), 2 * self.factor, self._limit)
            self.factor = max(self.factor, wanted)

    def state_dict(self) -> dict[str, int | None]:
        return {"factor": self.factor, "considered_at": self._considered_at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state, within the present limit."""
        self.factor, self._considered_at = min(state["factor"], self._limit), state["considered_at"]
