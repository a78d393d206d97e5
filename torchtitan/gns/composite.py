"""The whole model's sums on steps without sketches: what is measured every step stands in for what is not.

On measured steps the ratios between the token part (the blocks' linears over tokens) and the modulation part are
learned, of the second moment bin by bin, of the signal for all bins in common; on every step the modulation part times
these ratios takes the place of the token part.
"""

import math

import torch
from torch import Tensor

from torchtitan.gns.capture import FREE_PARTS, PARTS, StepSums
from torchtitan.gns.statistics import PairSums

_MODULATION, _TOKEN = PARTS.index("modulation"), PARTS.index("token")


class Composite:
    """Ratios of token to modulation of one geometry, pooled over measured steps with a decay per sample."""

    def __init__(self, num_bins: int, geometry: int, half_life: float, ramp: float = math.inf) -> None:
        """`half_life`: samples of a bin after which a step counts half; it and `ramp` are as in DecayedSums."""
        self._geometry, self._half_life, self._ramp = geometry, half_life, ramp
        self._seen = torch.zeros(num_bins, dtype=torch.float64)
        # Rows: samples, pairs, and of both parts the squares and the pairs' products.
        self._sums = torch.zeros(6, num_bins, dtype=torch.float64)

    def calibrate(self, sums: StepSums) -> None:
        """Learn from a measured step."""
        of_parts = []
        for part in (_TOKEN, _MODULATION):
            squares = sums.squares[part, self._geometry]
            of_parts += [squares, sums.all_products[part, self._geometry].diagonal() - squares]
        found = torch.stack((sums.count, sums.all_pairs.diagonal(), *of_parts))
        if found.isfinite().all():
            half_life = (self._ramp * self._seen).nan_to_num(math.inf).clamp(max=self._half_life)
            kept = torch.where(sums.count > 0, 0.5 ** (sums.count / half_life), 1.0)
            self._sums = self._sums * kept + found
            self._seen = self._seen + sums.count

    def ratios(self) -> tuple[Tensor, Tensor]:
        """Token / modulation of the second moment [K] and of the signal (scalar); NaN before there are any."""
        count, pairs, token_squares, token_products, squares, products = self._sums
        # A bin's weight is the inverse of its second moment, so that no bin's scale decides.
        weight = torch.where(pairs > 0, count / ((token_squares + squares) * pairs), 0.0)
        return token_squares / squares, (weight * token_products).sum() / (weight * products).sum()

    def sums(self, sums: StepSums) -> PairSums:
        """The whole model's sums of a step, from its pairs within microbatches."""
        of_squares, of_signal = self.ratios()
        squares = sums.squares[: len(FREE_PARTS), self._geometry].sum(0)
        products = sums.products[: len(FREE_PARTS), self._geometry].sum(0)
        modulation_squares = sums.squares[_MODULATION, self._geometry]
        modulation = sums.products[_MODULATION, self._geometry]
        own = torch.diag(modulation_squares)
        return PairSums(
            sums.count,
            squares + of_squares * modulation_squares,
            products + of_signal * (modulation - own) + torch.diag(of_squares * modulation_squares),
            sums.pairs,
        )

    def state_dict(self) -> dict[str, list]:
        return {"sums": self._sums.tolist(), "seen": self._seen.tolist()}

    def load_state_dict(self, state: dict[str, list]) -> None:
        self._sums = torch.tensor(state["sums"], dtype=torch.float64)
        self._seen = torch.tensor(state["seen"], dtype=torch.float64)
