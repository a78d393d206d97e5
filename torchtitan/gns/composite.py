"""Composite estimate of the whole model's noise scale: measured steps, corrected by what the free parts say on all steps.

On every step the free parts of the model are measured, and the modulation part times a slope learned on measured steps
stands in for the token part: a proxy F of the whole model W. On a measured step W itself is known. What
F's sums over p pairs (or samples) exceed,

    C = n_F - p (mean of F per pair over the entry, which is the measured step and the free ones before it),

is 0 in expectation, given the counts, as long as the weights hardly move within an entry, whatever the slope is. So it
is a control variate of the measured step's W: see `torchtitan.gns.control_variate`. With a coefficient of 1 and F = W the
measured step's mean is replaced by that of the entry. Where signal dominates and microbatches are small against the
step, the best one is larger, up to the ratio of the step's pairs to those of the free products, and it is near 0 where F
says nothing about W.

Source: double sampling with regression, Cochran, "Sampling techniques", chapter 12.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from torchtitan.gns.capture import FREE_PARTS, PARTS, StepSums
from torchtitan.gns.decayed import kept_share
from torchtitan.gns.statistics import PairSums, RatioMoments

_MODULATION, _TOKEN = PARTS.index("modulation"), PARTS.index("token")

# From fewer measured steps slopes come out anywhere (34 instead of 0.7 has been seen from two, and stays in a long
# average): until then the ratio of the squares stands in.
_STEPS_FOR_SLOPE = 5.0

# As many measured steps weigh the common slope of all bins in each bin's own.
_STEPS_OF_COMMON = 4.0

# Half-life of what is learned: at most this share of the samples so far.
_LEARNING_SHARE = 0.25


@dataclass(frozen=True)
class FreeSums:
    """Sums of the free parts in one geometry, over some steps; K bins, P free parts, float64.

    Attributes:
        count: samples [K].
        pairs: ordered pairs of samples of one microbatch, own pairs not counted, [K, K].
        squares: sums of squared norms [P, K].
        products: inner products of the bins' sums within microbatches [P, K, K].
    """

    count: Tensor
    pairs: Tensor
    squares: Tensor
    products: Tensor

    @classmethod
    def zeros(cls, num_bins: int) -> "FreeSums":
        parts, bins = len(FREE_PARTS), num_bins
        shapes = (bins,), (bins, bins), (parts, bins), (parts, bins, bins)
        return cls(*(torch.zeros(shape, dtype=torch.float64) for shape in shapes))

    @classmethod
    def of(cls, sums: StepSums, geometry: int) -> "FreeSums":
        """Sums of one step in the geometry of this index of GEOMETRIES."""
        parts = slice(len(FREE_PARTS))
        return cls(sums.count, sums.pairs, sums.squares[parts, geometry], sums.products[parts, geometry])

    def __add__(self, other: "FreeSums") -> "FreeSums":
        return FreeSums(*(one + more for one, more in zip(vars(self).values(), vars(other).values(), strict=True)))

    def is_finite(self) -> bool:
        return all(bool(part.isfinite().all()) for part in (self.squares, self.products))

    def combined(self) -> "FreeSums":
        """Sums of all bins as one."""
        count, squares = self.count.sum(0, keepdim=True), self.squares.sum(-1, keepdim=True)
        return FreeSums(count, self.pairs.sum((0, 1), keepdim=True), squares, self.products.sum((-2, -1), keepdim=True))

    def modulation(self) -> PairSums:
        """Sums of the modulation part alone."""
        return PairSums(self.count, self.squares[_MODULATION], self.products[_MODULATION], self.pairs)


class Composite:
    """Control variates of the measured steps of one geometry; what it has learned decays as in DecayedSums."""

    def __init__(self, num_bins: int, geometry: int, half_life: float, share: float | None = _LEARNING_SHARE) -> None:
        """
        Args:
            num_bins: K.
            geometry: index of GEOMETRIES.
            half_life: of what is learned, see DecayedSums.
            share: of the samples so far that it is at most; None: no limit.
        """
        self._share = None if share is None else torch.tensor([[share]], dtype=torch.float64)
        self.num_bins, self._geometry, self._half_life = num_bins, geometry, half_life
        self._seen = torch.zeros(num_bins, dtype=torch.float64)  # samples trained of each bin
        # Of the token and the modulation part: second moments, then signals.
        self._parts = RatioMoments.of(torch.zeros(num_bins, 4, 2, dtype=torch.float64))

    def add(self, entry: FreeSums, sums: StepSums) -> tuple[PairSums, Tensor] | None:
        """Add a measured step; return the whole model's sums and C of second moment and signal, [K, 2].

        Args:
            entry: of the steps since the previous measured one, this one included.

        Returns:
            None, and nothing is learned, where a sum is not finite.
        """
        assert sums.all_pairs is not None
        squares, products = sums.squares[:, self._geometry].sum(0), sums.all_products[:, self._geometry].sum(0)
        whole = PairSums(sums.count, squares, products, sums.all_pairs)
        multipliers = self.token_to_modulation()
        of_step, of_entry = (_proxy(of, *multipliers) for of in (FreeSums.of(sums, self._geometry), entry))
        if not (whole.is_finite() and of_entry.is_finite()):
            return None
        self._learn(entry.count, sums, sums.all_pairs)
        return whole, _excess(of_step, of_entry)

    def token_to_modulation(self) -> tuple[Tensor, Tensor]:
        """Multiplier of the modulation part: for the second moment [K], for the signal [K]; NaN while unknown.

        The signal's is each bin's own slope, shrunk towards the slope common to all bins as if by some more steps of
        it.
        """
        token_squares, squares, *_ = self._parts.ratios.unbind(-1)
        of_squares = token_squares / squares
        # A bin's weight is the inverse of its second moment squared, so that no bin's scale decides.
        weight = self._parts.first[:, 3, 1] / (token_squares + squares) ** 2
        covariance = self._parts.covariance[:, 2:, 2:]
        enough = self._parts.steps >= _STEPS_FOR_SLOPE
        own = torch.where(enough, covariance[:, 0, 1] / covariance[:, 1, 1], torch.nan)
        weight = torch.where(enough, weight, 0.0)
        common = _weighted_sum(weight, covariance[:, 0, 1]) / _weighted_sum(weight, covariance[:, 1, 1])
        common = torch.where(common.isfinite(), common, of_squares)
        degrees = torch.where(own.isfinite(), self._parts.steps - 1.0, 0.0)
        slope = (degrees * own.nan_to_num() + _STEPS_OF_COMMON * common) / (degrees + _STEPS_OF_COMMON)
        # Not negative but by the error of a few samples.
        return of_squares, slope.clamp(0.0, 100.0)

    def _learn(self, trained: Tensor, sums: StepSums, all_pairs: Tensor) -> None:
        kept = kept_share(trained, self._seen, self._half_life, self._share)[0]
        self._seen = self._seen + trained
        found = self._of_parts(sums, all_pairs)
        if found.isfinite().all():
            self._parts = self._parts.decayed(kept) + RatioMoments.of(found)

    def _of_parts(self, sums: StepSums, all_pairs: Tensor) -> Tensor:
        second_moments, signals = [], []
        for part in (_TOKEN, _MODULATION):
            squares = sums.squares[part, self._geometry]
            second_moments.append(torch.stack((squares, sums.count), dim=-1))
            products = sums.all_products[part, self._geometry].diagonal()
            signals.append(torch.stack((products - squares, all_pairs.diagonal()), dim=-1))
        return torch.stack(second_moments + signals, dim=1)  # [K, 4, 2]

    def state_dict(self) -> dict[str, list]:
        """Return plain lists of numbers, which JSON holds exactly."""
        return {name: tensor.tolist() for name, tensor in self._tensors().items()}

    def load_state_dict(self, state: dict[str, list]) -> None:
        """Resume from a state of as many bins."""
        found = {name: torch.tensor(state[name], dtype=torch.float64) for name in self._tensors()}
        self._seen, self._parts = found["seen"], RatioMoments(found["parts_first"], found["parts_second"])

    def _tensors(self) -> dict[str, Tensor]:
        return {"seen": self._seen, "parts_first": self._parts.first, "parts_second": self._parts.second}


def _proxy(sums: FreeSums, of_squares: Tensor, of_signal: Tensor) -> PairSums:
    """F of the whole model: the free parts, and the modulation part times multipliers [K] for the token part."""
    own, products = sums.squares[_MODULATION], sums.products[_MODULATION].diagonal()
    of_squares, of_signal = of_squares.nan_to_num(), of_signal.nan_to_num()
    # Of each bin with itself alone: nothing is estimated between bins.
    stand_in = (of_signal * (products - own) + of_squares * own).diag()
    return PairSums(sums.count, sums.squares.sum(0) + of_squares * own, sums.products.sum(0) + stand_in, sums.pairs)


def _excess(step: PairSums, entry: PairSums) -> Tensor:
    """C of the second moment and of the signal, [K, 2]: F's sums of a step less its share of an entry's."""
    numerator, weight = _numerators_and_weights(step).unbind(-1)
    of_entry, entry_weight = _numerators_and_weights(entry).unbind(-1)
    excess = numerator - weight * of_entry / entry_weight
    # A step without pairs, or an entry without further ones, leaves nothing but rounding. Coefficients are common to all
    # bins, and without the signal's C that of the second moment does not predict the share's error: both are left out.
    told = ((weight > 0) & (entry_weight > weight)).all(-1, keepdim=True)
    return torch.where(told, excess, 0.0)


def _numerators_and_weights(sums: PairSums) -> Tensor:
    """Pairs (numerator, weight) of the second moment and of the signal, [K, 2, 2]."""
    signal = torch.stack((sums.products.diagonal() - sums.squares, sums.pairs.diagonal()), dim=-1)
    return torch.stack((torch.stack((sums.squares, sums.count), dim=-1), signal), dim=-2)


def _weighted_sum(weights: Tensor, values: Tensor) -> Tensor:
    """Weighted sum over the bins that have a weight and a finite value."""
    return torch.where((weights > 0) & values.isfinite(), weights * values, 0.0).sum()
