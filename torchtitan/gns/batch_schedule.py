"""A global batch that grows with the measured noise scale, at a fixed microbatch: more of them are accumulated.

Source of growing the batch instead of letting the learning rate fall: Smith et al., "Don't decay the learning rate,
increase the batch size", arXiv 1711.00489. Of the noise scale as the batch's measure: McCandlish et al., arXiv
1812.06162. Of the square-root rule: Malladi et al., "On the SDEs and scaling rules for adaptive gradient algorithms",
arXiv 2205.10287.
"""

import math


class BatchSchedule:
    """Decides by which factor the global batch is larger than at first. It grows and never shrinks.

    A change is considered after `warmup` samples, and then every `interval` steps. The factor becomes the largest whole
    number whose batch is at most the lower end of the noise scale's interval, but not more than twice what it was, nor
    more than `limit`. So a noise scale that is not known, or not known well, leaves the batch as it is.

    Attributes:
        factor: of the next step, an integer from 1.
    """

    def __init__(self, batch_size: int, *, limit: int, warmup: int, interval: int) -> None:
        """
        Args:
            batch_size: global, at factor 1, in samples.
            limit: largest factor, >= 1.
            warmup: samples of the run before the first change, >= 0.
            interval: steps from one consideration to the next, >= 1.
        """
        self._batch_size, self._limit, self._warmup, self._interval = batch_size, limit, warmup, interval
        self.factor = 1
        self._considered_at: int | None = None  # step

    def update(self, step: int, samples: int, lower: float) -> None:
        """After a step: decide the factor from step + 1 on.

        Args:
            step: the one just made.
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

    def load_state_dict(self, state: dict[str, int | None]) -> None:
        """Resume from a state, within the present limit."""
        self.factor, self._considered_at = min(state["factor"], self._limit), state["considered_at"]


def lr_multiple(factor: int) -> float:
    """How many times larger Adam's learning rate is at a batch `factor` times as large: the square root."""
    return math.sqrt(factor)
