"""Agreement of the bins' mean gradients over training, in the finest bins in which it is known.

The signals of many narrow bins are each a small difference of large sums, and their cosines are noise. Samples of
neighbours put together have as many more pairs: the same measurements are pooled in fewer, wider bins too.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from torchtitan.gns.capture import GEOMETRIES, StepSums
from torchtitan.gns.decayed import BinEstimates, DecayedSums
from torchtitan.gns.statistics import PairSums, cosine_stderr, cosines

# A cosine is known to this standard error, which tells conflict from agreement.
_LARGEST_ERROR = 0.5

# Gradients of early training must not outweigh later ones for long, see DecayedSums.
_RAMP = 0.25


class Agreement:
    """Decayed sums of all pairs of measured steps, in half as many bins, a quarter, and so on down to two."""

    def __init__(self, num_bins: int, num_geometries: int, half_life: float) -> None:
        """`half_life`: samples of a bin, one of `num_bins`, after which a step counts half."""
        self.num_bins = num_bins
        self._sums = {
            geometry: [DecayedSums(count, half_life * num_bins / count, _RAMP) for count in coarser(num_bins)]
            for geometry in GEOMETRIES[:num_geometries]
        }

    def add(self, sums: StepSums) -> None:
        """Add a step; one that was not measured says nothing."""
        if sums.all_pairs is None:
            return
        squares, products = sums.squares.sum(0), sums.all_products.sum(0)
        for index, levels in enumerate(self._sums.values()):
            if squares[index].any():  # else there is no second moment yet
                found = PairSums(sums.count, squares[index], products[index], sums.all_pairs)
                for level in levels:
                    level.add(found.combined(wider_bins(self.num_bins, level.num_bins), level.num_bins))

    def estimates(self, geometry: str) -> list[BinEstimates]:
        """Estimates in fewer and fewer bins."""
        return [level.estimate() for level in self._sums[geometry]]

    def state_dict(self) -> dict:
        levels = {geometry: [level.state_dict() for level in found] for geometry, found in self._sums.items()}
        return {"num_bins": self.num_bins, "levels": levels}

    def load_state_dict(self, state: dict) -> None:
        """Resume from a state; one of other bins or geometries is dropped."""
        if state["num_bins"] != self.num_bins or set(state["levels"]) != set(self._sums):
            return
        for geometry, levels in self._sums.items():
            for level, found in zip(levels, state["levels"][geometry], strict=True):
                level.load_state_dict(found)


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
