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
        self._trained = torch.zeros(num_bins, dtype=torch.float64)  # since the last measured step
        # Of the token and the modulation part: second moments, then signals.
        self._parts = RatioMoments.of(torch.zeros(num_bins, 4, 2, dtype=torch.float64))
        self._all = PairSums.zeros(num_bins)  # F since the last measured step
        self._multipliers: tuple[Tensor, Tensor] | None = None  # known until the next measured step

    def add(self, sums: StepSums) -> tuple[PairSums, Tensor] | None:
        """Add one step; return of a measured one the whole model's sums and C of second moment and signal, [K, 2]."""
        proxy = self._proxy(sums)
        if not proxy.is_finite():
            return None
        self._trained = self._trained + sums.count
        self._all = self._all + proxy
        if sums.all_pairs is None:
            return None
        squares, products = sums.squares[:, self._geometry].sum(0), sums.all_products[:, self._geometry].sum(0)
        whole = PairSums(sums.count, squares, products, sums.all_pairs)
        if not whole.is_finite():
            return None
        excess = self._excess(proxy)
        self._learn(sums, sums.all_pairs)
        self._all = PairSums.zeros(self.num_bins)
        return whole, excess

    def _excess(self, proxy: PairSums) -> Tensor:
        """C of the second moment and of the signal, [K, 2]."""
        numerator, weight = _numerators_and_weights(proxy).unbind(-1)
        of_entry, entry_weight = _numerators_and_weights(self._all).unbind(-1)
        # An entry without further pairs leaves nothing but rounding.
        return torch.where(entry_weight > weight, numerator - weight * of_entry / entry_weight, 0.0)

    def _proxy(self, sums: StepSums) -> PairSums:
        if self._multipliers is None:
            of_squares, of_signal = self.token_to_modulation()
            self._multipliers = of_squares.nan_to_num(), of_signal.nan_to_num()
        of_squares, of_signal = self._multipliers
        squares = sums.squares[: len(FREE_PARTS), self._geometry].sum(0)
        products = sums.products[: len(FREE_PARTS), self._geometry].sum(0)
        own = sums.squares[_MODULATION, self._geometry]
        pairs = sums.products[_MODULATION, self._geometry].diagonal() - own
        # Of each bin with itself alone: nothing is estimated between bins.
        stand_in = (of_signal * pairs + of_squares * own).diag()
        return PairSums(sums.count, squares + of_squares * own, products + stand_in, sums.pairs)

    def token_to_modulation(self) -> tuple[Tensor, Tensor]:
        """Multiplier of the modulation part: for the second moment [K], for the signal [K]; NaN while unknown.

        The signal's is each bin's own slope, shrunk towards the slope common to all bins as if by some more steps of
        it. It changes with measured steps alone, so that all steps of an entry have the same.
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

    def _learn(self, sums: StepSums, all_pairs: Tensor) -> None:
        self._multipliers = None
        kept = kept_share(self._trained, self._seen, self._half_life, self._share)[0]
        self._seen, self._trained = self._seen + self._trained, torch.zeros_like(self._trained)
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
        self._seen, self._trained = found["seen"], found["trained"]
        self._multipliers = None
        self._parts = RatioMoments(found["parts_first"], found["parts_second"])
        self._all = PairSums(*(found[name] for name in ("count", "squares", "products", "pairs")))

    def _tensors(self) -> dict[str, Tensor]:
        return {
            "seen": self._seen, "trained": self._trained,
            "parts_first": self._parts.first, "parts_second": self._parts.second, **vars(self._all),
        }  # fmt: skip


def _numerators_and_weights(sums: PairSums) -> Tensor:
    """Pairs (numerator, weight) of the second moment and of the signal, [K, 2, 2]."""
    signal = torch.stack((sums.products.diagonal() - sums.squares, sums.pairs.diagonal()), dim=-1)
    return torch.stack((torch.stack((sums.squares, sums.count), dim=-1), signal), dim=-2)


def _weighted_sum(weights: Tensor, values: Tensor) -> Tensor:
    """Weighted sum over the bins that have a weight and a finite value."""
    return torch.where((weights > 0) & values.isfinite(), weights * values, 0.0).sum()
