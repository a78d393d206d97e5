"""Outlier steps: gradients so far above those of earlier steps that a noise scale from them would mean nothing.

One sample whose gradient is a million times the others' has 10^12 times their square. It decides a pooled second moment
for as long as it is remembered, and the signal, a small difference of such sums, comes out anywhere, also negative.
"""

import math

import torch
from torch import Tensor

_STEPS = 64  # remembered of each bin
_LEAST_STEPS = 32  # before which nothing stands out
_LEAST_RATIO = 1e6  # of the mean square to its running median
_DEVIATIONS = 8.0  # robust standard deviations of its ln

_NORMAL = 1.4826  # standard deviation of a normal distribution over its median absolute deviation


class OutlierRule:
    """Outlier rule: mean squared gradients of the latest steps by bin, against which a new one is compared.

    A bin's mean square is an outlier if it exceeds the median of its latest 64 a million times (a norm
    a thousand times), and its ln by 8 standard deviations, estimated by 1.4826 times the median absolute deviation of
    theirs. Nothing is an outlier of fewer than 32. Squared norms of single samples that are lognormal, however wide,
    thus practically never do; the mean of a step's samples varies less. Every value is remembered, outliers too, so
    that a lasting change is ordinary after half of the memory at the latest.

    Attributes:
        count: outlier steps.
    """

    def __init__(self, num_bins: int) -> None:
        self.count = 0
        self._logs = torch.full((num_bins, _STEPS), torch.nan, dtype=torch.float64)  # a ring in each bin
        self._seen = torch.zeros(num_bins, dtype=torch.int64)

    def stands_out(self, mean_squares: Tensor) -> bool:
        """Check whether a step is an outlier by the mean squared gradient of each bin [K], in any bin, and remember it.

        A bin without samples (NaN), or with a square that is zero or infinite, is left out.
        """
        logs = mean_squares.log()
        known = logs.isfinite()
        found = self._exceed_limit(logs, known & (self._seen >= _LEAST_STEPS))
        self._logs[known, self._seen[known] % _STEPS] = logs[known]
        self._seen += known
        self.count += found
        return found

    def _exceed_limit(self, logs: Tensor, judged: Tensor) -> bool:
        lowest = self._logs.nan_to_num(nan=torch.inf).amin(1)  # at most the median: ordinary steps end here
        if not (judged & (logs > lowest + math.log(_LEAST_RATIO))).any():
            return False
        median = self._logs.nanmedian(1).values
        deviation = _NORMAL * (self._logs - median[:, None]).abs().nanmedian(1).values
        limit = median + (_DEVIATIONS * deviation).clamp_min(math.log(_LEAST_RATIO))
        return bool((judged & (logs > limit)).any())

    def state_dict(self) -> dict:
        """Return plain numbers: of each bin the latest steps' ln, the oldest first, and how many there were."""
        rings = [
            ring.roll(-int(seen) % _STEPS if seen >= _STEPS else 0)[: int(seen)].tolist()
            for ring, seen in zip(self._logs, self._seen, strict=True)
        ]
        return {"count": self.count, "seen": self._seen.tolist(), "logs": rings}

    def load_state_dict(self, state: dict) -> None:
        """Resume from a state of as many bins; an empty one is that of a new run."""
        fresh = {"count": 0, "seen": [0] * len(self._seen), "logs": [[]] * len(self._seen)}
        state = fresh | state
        self.count, self._seen = state["count"], torch.tensor(state["seen"], dtype=torch.int64)
        self._logs.fill_(torch.nan)
        for ring, logs, seen in zip(self._logs, state["logs"], state["seen"], strict=True):
            places = (seen - len(logs) + torch.arange(len(logs))) % _STEPS
            ring[places] = torch.tensor(logs, dtype=torch.float64)
