"""Agreement of the bins' mean gradients over training, in the finest bins in which it is known.

The signals of many narrow bins are each a small difference of large sums, and their cosines are noise. Samples of
neighbours put together have as many more pairs: the same measurements are pooled in fewer, wider bins too.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from torchtitan.gns.capture import GEOMETRIES, StepSums
from torchtitan.gns.decayed import WINDOW_SHARES, BinEstimates, DecayedSums
from torchtitan.gns.statistics import PairSums, cosine_stderr, cosines

# A cosine is known to this standard error, which tells conflict from agreement.
_LARGEST_ERROR = 0.5


class Agreement:
    """Decayed sums of all pairs of measured steps, in half as many bins, a quarter, and so on down to two."""

    def __init__(self, num_bins: int, num_geometries: int, half_life: float) -> None:
        """`half_life`: samples trained of a bin, one of `num_bins`, after which a step counts half, at most."""
        self.num_bins = num_bins
        self._sums = {
            geometry: [DecayedSums(count, half_life * num_bins / count, WINDOW_SHARES) for count in coarser(num_bins)]
            for geometry in GEOMETRIES[:num_geometries]
        }
        # Samples trained since the last measured step, by geometry: none before the geometry's first.
        self._trained = torch.zeros(num_geometries, num_bins, dtype=torch.float64)

    def add(self, sums: StepSums) -> None:
        """Add a step; one that was not measured says only how many samples were trained."""
        for index, levels in enumerate(self._sums.values()):
            if not sums.squares[:, index].any():
                continue  # no second moment yet
            self._trained[index] += sums.count
            if sums.all_pairs is None:
                continue
            found = PairSums(sums.count, sums.squares[:, index].sum(0), sums.all_products[:, index].sum(0), sums.all_pairs)
            trained, self._trained[index] = self._trained[index].clone(), 0.0
            for level in levels:
                wide = wider_bins(self.num_bins, level.num_bins)
                of_level = torch.zeros(level.num_bins, dtype=torch.float64).index_add_(0, wide, trained)
                level.add(found.combined(wide, level.num_bins), of_level)

    def estimates(self, geometry: str, window: int) -> list[BinEstimates]:
        """Estimates in fewer and fewer bins, from a window of `DecayedSums`."""
        return [level.estimate(window=window) for level in self._sums[geometry]]

    def state_dict(self) -> dict:
        levels = {geometry: [level.state_dict() for level in found] for geometry, found in self._sums.items()}
        return {"num_bins": self.num_bins, "levels": levels, "trained": self._trained.tolist()}

    def load_state_dict(self, state: dict) -> None:
        """Resume from a state; one of other bins or geometries is dropped."""
        if state["num_bins"] != self.num_bins or set(state["levels"]) != set(self._sums):
            return
        for geometry, levels in self._sums.items():
            for level, found in zip(levels, state["levels"][geometry], strict=True):
                level.load_state_dict(found)
        self._trained = torch.tensor(state["trained"], dtype=torch.float64)


def coarser(num_bins: int) -> Iterator[int]:
    """Numbers of bins below K: each half of the one before, rounded up, down to two."""
    while num_bins > 2:
        num_bins = -(-num_bins // 2)
        yield num_bins


def wider_bins(num_bins: int, count: int) -> Tensor:
    """Wide bin of each bin, int64 [K]: neighbours share one, as many as possible in each."""
    return torch.arange(num_bins) * count // num_bins


def known_cosines(found: BinEstimates) -> Tensor:
    """Cosines between the bins' mean gradients [K, K]; NaN where a signal is too weak or the error is too large."""
    values = cosines(found.matrix, found.matrix_stderr.diagonal())
    return torch.where(cosine_stderr(found.matrix, found.matrix_stderr) <= _LARGEST_ERROR, values, torch.nan)


def finest_known(levels: Sequence[BinEstimates]) -> Tensor | None:
    """Cosines of the first level of which at least half of the pairs of bins are known; None if there is none.

    Args:
        levels: estimates in fewer and fewer bins.
    """
    for found in levels:
        values = known_cosines(found)
        pairs = values[torch.triu(torch.ones_like(values, dtype=torch.bool), diagonal=1)]
        if len(pairs) and 2 * int(pairs.isfinite().sum()) >= len(pairs):
            return values
    return None
