"""Composite estimate of the whole model's noise scale from few steps with sketches and many without, by regression.

On every step the free parts of the model are measured, and the modulation part times a slope learned on measured steps
stands in for the token part: a proxy F of the whole model W. On measured steps W itself is known. With bars for pooled
means,

    W_all ~ W_measured + (F_all - F_measured),

which is unbiased bin by bin whatever the slope is, since the correction has mean zero; the slope decides how much of
the sampling error it takes away, most where it is that of the token part's regression on the modulation part over
steps. Source: double sampling with regression, Cochran, "Sampling techniques", chapter 12.
"""

import math

import torch
from torch import Tensor

from torchtitan.gns.capture import FREE_PARTS, PARTS, StepSums
from torchtitan.gns.decayed import BinEstimates, estimates_of_ratios, kept_share
from torchtitan.gns.statistics import PairSums, RatioMoments

_MODULATION, _TOKEN = PARTS.index("modulation"), PARTS.index("token")

# Of the six ratios (second moment and signal of W measured, F measured, F all): those of the estimate.
_SECOND_MOMENT, _SIGNAL = torch.eye(6, dtype=torch.float64).view(3, 2, 6).permute(1, 0, 2)
_COMBINATION = torch.stack([rows[0] - rows[1] + rows[2] for rows in (_SECOND_MOMENT, _SIGNAL)])  # [2, 6]


# From fewer measured steps slopes come out anywhere (34 instead of 0.7 has been seen from two, and stays in a long
# average): until then the ratio of the squares stands in.
_STEPS_FOR_SLOPE = 5.0

# As many measured steps weigh the common slope of all bins in each bin's own.
_STEPS_OF_COMMON = 4.0


class Composite:
    """Pooled steps of one geometry; older ones count less, as in DecayedSums."""

    def __init__(self, num_bins: int, geometry: int, half_life: float, ramp: float = math.inf) -> None:
        """
        Args:
            num_bins: K.
            geometry: index of GEOMETRIES.
            half_life, ramp: see DecayedSums.
        """
        self.num_bins, self._geometry, self._half_life, self._ramp = num_bins, geometry, half_life, ramp
        self._seen = torch.zeros(num_bins, dtype=torch.float64)
        # Of the token and the modulation part: second moments, then signals.
        self._parts = RatioMoments.of(torch.zeros(num_bins, 4, 2, dtype=torch.float64))
        self._ratios = RatioMoments.of(torch.zeros(num_bins, 6, 2, dtype=torch.float64))
        self._fourth_powers = torch.zeros(num_bins, dtype=torch.float64)
        self._all = PairSums.zeros(num_bins)  # F since the last measured step
        self._multipliers: tuple[Tensor, Tensor] | None = None  # known until the ratios change

    def add(self, sums: StepSums) -> None:
        """Add one step."""
        if sums.all_pairs is not None:
            self._learn_ratios(sums, sums.all_pairs)
        proxy = self._proxy(sums)
        if not proxy.is_finite():
            return
        self._all = self._all + proxy
        if sums.all_pairs is not None:
            self._close_entry(sums, sums.all_pairs, proxy)

    def estimate(self) -> BinEstimates:
        """Estimate every bin; without the matrix of inner products between bins."""
        covariance = torch.einsum("ri,kij,sj->krs", _COMBINATION, _finite(self._ratios.covariance), _COMBINATION)
        unknown = torch.tensor([[torch.inf, 0.0], [0.0, torch.inf]], dtype=torch.float64)
        enough = (self._ratios.steps >= 2.0)[:, None, None]
        return estimates_of_ratios(
            self._ratios.ratios @ _COMBINATION.T,
            torch.where(enough, covariance, unknown),
            samples=self._ratios.first[:, 4, 1],
            steps=self._ratios.steps,
            degrees=_degrees_of_freedom(self._ratios.second[:, 1, 1, 1, 1], self._fourth_powers),
        )

    def _proxy(self, sums: StepSums) -> PairSums:
        if self._multipliers is None:
            self._multipliers = self.token_to_modulation()
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

    def _learn_ratios(self, sums: StepSums, all_pairs: Tensor) -> None:
        second_moments, signals = [], []
        pairs = all_pairs.diagonal()
        for part in (_TOKEN, _MODULATION):
            squares = sums.squares[part, self._geometry]
            second_moments.append(torch.stack((squares, sums.count), dim=-1))
            products = sums.all_products[part, self._geometry].diagonal()
            signals.append(torch.stack((products - squares, pairs), dim=-1))
        found = torch.stack(second_moments + signals, dim=1)  # [K, 4, 2]
        if found.isfinite().all():
            kept = kept_share(sums.count, self._seen, self._half_life, self._ramp)
            self._parts = self._parts.decayed(kept) + RatioMoments.of(found)
            self._multipliers = None

    def _close_entry(self, sums: StepSums, all_pairs: Tensor, proxy: PairSums) -> None:
        squares, products = sums.squares[:, self._geometry].sum(0), sums.all_products[:, self._geometry].sum(0)
        whole = PairSums(sums.count, squares, products, all_pairs)
        values = torch.stack([_pairs_of_ratios(part) for part in (whole, proxy, self._all)], dim=1)  # [K, 3, 2, 2]
        # The kept share is the same for all six ratios: that of the measured step's samples.
        kept = kept_share(sums.count, self._seen, self._half_life, self._ramp)
        self._ratios = self._ratios.decayed(kept) + RatioMoments.of(values.flatten(1, 2))
        self._fourth_powers = self._fourth_powers * kept**4 + all_pairs.diagonal() ** 4
        self._seen = self._seen + sums.count
        self._all = PairSums.zeros(self.num_bins)

    def state_dict(self) -> dict[str, list]:
        """Return plain lists of numbers, which JSON holds exactly."""
        return {name: tensor.tolist() for name, tensor in self._tensors().items()}

    def load_state_dict(self, state: dict[str, list]) -> None:
        """Resume from a state of as many bins."""
        found = {name: torch.tensor(state[name], dtype=torch.float64) for name in self._tensors()}
        self._seen, self._fourth_powers = found["seen"], found["fourth_powers"]
        self._parts = RatioMoments(found["parts_first"], found["parts_second"])
        self._ratios = RatioMoments(found["ratios_first"], found["ratios_second"])
        self._multipliers = None
        self._all = PairSums(*(found[name] for name in ("count", "squares", "products", "pairs")))

    def _tensors(self) -> dict[str, Tensor]:
        return {
            "seen": self._seen, "fourth_powers": self._fourth_powers,
            "parts_first": self._parts.first, "parts_second": self._parts.second,
            "ratios_first": self._ratios.first, "ratios_second": self._ratios.second, **vars(self._all),
        }  # fmt: skip


def _pairs_of_ratios(sums: PairSums) -> Tensor:
    """Pairs (numerator, weight) of the second moment and of the signal, [K, 2, 2]."""
    signal = torch.stack((sums.products.diagonal() - sums.squares, sums.pairs.diagonal()), dim=-1)
    return torch.stack((torch.stack((sums.squares, sums.count), dim=-1), signal), dim=-2)


def _weighted_sum(weights: Tensor, values: Tensor) -> Tensor:
    """Weighted sum over the bins that have a weight and a finite value."""
    return torch.where((weights > 0) & values.isfinite(), weights * values, 0.0).sum()


def _finite(covariance: Tensor) -> Tensor:
    return torch.where(covariance.isfinite(), covariance, 0.0)


def _degrees_of_freedom(squares: Tensor, fourth_powers: Tensor) -> Tensor:
    return torch.where(squares > 0, squares**2 / fourth_powers, 0.0) - 1.0
