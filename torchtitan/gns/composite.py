"""Composite estimate of the whole model's noise scale: measured steps, corrected by what the free parts say on all steps.

On every step the free parts of the model are measured, and the modulation part times a slope learned on measured steps
stands in for the token part: a proxy F of the whole model W. On a measured step W itself is known. What
F's sums over p pairs (or samples) exceed,

    C = n_F - p (mean of F per pair over the entry, which is the measured step and the free ones before it),

is 0 in expectation, given the counts, as long as the weights hardly move within an entry, whatever the slope is. So it
is a control variate of the measured step's W: see `ControlledSums`. With a coefficient of 1 and F = W the
measured step's mean is replaced by that of the entry. Where signal dominates and microbatches are small against the
step, the best one is larger, up to the ratio of the step's pairs to those of the free products, and it is near 0 where F
says nothing about W.

Source: double sampling with regression, Cochran, "Sampling techniques", chapter 12.
"""

from dataclasses import dataclass
from typing import Self, cast

import torch
from torch import Tensor

from torchtitan.gns.decayed import BinEstimates, DecayedSums, degrees_of_freedom, estimates_of_ratios, kept_share
from torchtitan.gns.statistics import PairSums, RatioMoments
from torchtitan.gns.step_sums import FREE_PARTS, PARTS, StepSums

_MODULATION, _TOKEN = PARTS.index("modulation"), PARTS.index("token")
_LEARNED_OF = [_TOKEN, _MODULATION]

# From fewer measured steps slopes come out anywhere (34 instead of 0.7 has been seen from two, and stays in a long
# average): until then the ratio of the squares stands in.
_STEPS_FOR_SLOPE = 5.0

# As many measured steps weigh the common slope of all bins in each bin's own.
_STEPS_OF_COMMON = 4.0

# Half-life of what is learned: at most this share of the samples so far.
_LEARNING_SHARE = 0.25

# Folds of the steps that are corrected by the coefficients of the other folds.
_FOLDS = 4

# A coefficient's F statistic F multiplies it by 1 - this / F, and by 0 below. It would be 2 if the steps had equal weights;
# under decay variances have half as many degrees of freedom as the steps that the mean is worth.
_SHRINKAGE = 4.0

# Fewer effective steps of the other folds tell no coefficient.
_LEAST_STEPS = 3.0

# Share of the square of C of the signal that must remain after the regression on the first regressor; less is rounding.
_LEAST_REST = 1e-9

# A step's vector v: sum and weight of the second moment and of the signal, and C of both.
_MOMENT, _COUNT, _SIGNAL, _PAIRS, _OF_MOMENT, _OF_SIGNAL = range(6)


@dataclass(frozen=True)
class FreeSums(PairSums):
    """Sums of the free parts in one geometry, over some steps: PairSums of groups that are microbatches, with `squares`
    [P, K] and `products` [P, K, K] of each of the P free parts.
    """

    @classmethod
    def zeros(cls, num_bins: int) -> Self:
        products = torch.zeros(len(FREE_PARTS), num_bins, num_bins, dtype=torch.float64)
        return cls(products[0, 0], products[:, 0], products, products[0])

    @classmethod
    def of(cls, sums: StepSums, geometry: int) -> "FreeSums":
        """Sums of one step in the geometry of this index of GEOMETRIES."""
        parts = slice(len(FREE_PARTS))
        return cls(sums.count, sums.squares[parts, geometry], sums.products[parts, geometry], sums.pairs)

    def of_all_bins(self) -> "FreeSums":
        """Sums of all bins as one."""
        count, squares = self.count.sum(0, keepdim=True), self.squares.sum(-1, keepdim=True)
        return FreeSums(count, squares, self.products.sum((-2, -1), keepdim=True), self.pairs.sum((0, 1), keepdim=True))

    def modulation(self) -> PairSums:
        """Sums of the modulation part alone."""
        return PairSums(self.count, self.squares[_MODULATION], self.products[_MODULATION], self.pairs)


class Composite:
    """Control variates of the measured steps of one geometry; what it has learned decays as in DecayedSums."""

    def __init__(self, num_bins: int, geometry: int, half_life: float, share: float | None = _LEARNING_SHARE) -> None:
        """share: of the samples so far that it is at most; None: no limit."""
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
        whole, multipliers = sums.whole(self._geometry), self.token_to_modulation()
        of_step, of_entry = _proxy(FreeSums.of(sums, self._geometry), *multipliers), _proxy(entry, *multipliers)
        if not (whole.is_finite() and of_entry.isfinite().all()):
            return None
        self._learn(entry.count, sums)
        (numerator, weight), (numerator_of_entry, weight_of_entry) = of_step.unbind(-1), of_entry.unbind(-1)
        excess = numerator - weight * numerator_of_entry / weight_of_entry
        # A step without pairs, or an entry without further ones, leaves nothing but rounding. Coefficients are common to all
        # bins, and without the signal's C that of the second moment does not predict the share's error: both are left out.
        told = ((weight > 0) & (weight_of_entry > weight)).all(-1, keepdim=True)
        return whole, torch.where(told, excess, 0.0)

    def token_to_modulation(self) -> tuple[Tensor, Tensor]:
        """Multiplier of the modulation part: for the second moment [K], for the signal [K]; NaN while unknown.

        The signal's is each bin's own slope, shrunk towards the common one as if by some more steps of it.
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

    def _learn(self, trained: Tensor, sums: StepSums) -> None:
        kept = kept_share(trained, self._seen, self._half_life, self._share)[0]
        self._seen = self._seen + trained
        squares, products = sums.squares[:, self._geometry], sums.all_products[:, self._geometry].diagonal(dim1=1, dim2=2)
        counts, pairs = sums.count, cast(Tensor, sums.all_pairs).diagonal()
        moments = torch.stack((squares[_LEARNED_OF], counts.expand(2, -1)), dim=-1)  # [2, K, 2]
        signals = torch.stack(((products - squares)[_LEARNED_OF], pairs.expand(2, -1)), dim=-1)
        found = torch.stack((*moments, *signals), dim=1)  # [K, 4, 2]
        if found.isfinite().all():
            self._parts = self._parts.with_step(kept, found)

    def state_dict(self) -> dict[str, list]:
        """Return plain lists of numbers, which JSON holds exactly."""
        return {name: tensor.tolist() for name, tensor in self._tensors().items()}

    def load_state_dict(self, state: dict[str, list]) -> None:
        """Resume from a state of as many bins."""
        found = {name: torch.tensor(state[name], dtype=torch.float64) for name in self._tensors()}
        self._seen, self._parts = found["seen"], RatioMoments(found["parts_first"], found["parts_second"])

    def _tensors(self) -> dict[str, Tensor]:
        return {"seen": self._seen, "parts_first": self._parts.first, "parts_second": self._parts.second}


@dataclass(frozen=True)
class Coefficients:
    """Coefficients of each fold's steps from the other folds; float64, J folds.

    Attributes:
        moment: of the second moment's C, taken from the second moment, [J, K].
        share: of C of the second moment and of the signal, from the signal, to correct its share, [J, K, 2].
    """

    moment: Tensor
    share: Tensor


class ControlledSums:
    """Pools measured steps with their control variates, quantities of mean zero that tell some of a step's error, beside the
    DecayedSums of the same steps and in its windows.

    A step's sums n (over pairs, for the signal, or samples, for the second moment) with a control variate C, of which
    E[C] = 0 given the counts, are replaced by n - beta C. The best beta is the regression of n on C. Fitted on the steps
    that it is applied to, it would bias the estimate, since it depends on their C. So the steps are dealt to J folds, and
    those of one fold have the beta of the other folds: E[beta C] = E[beta] E[C] = 0, whatever the beta. Some twenty steps tell
    a bin's own beta poorly, and what a step's free pairs say is much alike in all bins: one beta is fitted to all of them. It is
    drawn to 0, to the sums themselves, as far as it is not significant, so that a useless control variate costs about nothing.

    The noise scale depends only on the signal's share of the second moment. The errors of a step's two sums are correlated and
    cancel in large part in their ratio. Separate corrections would undo that where microbatches are small, since the second
    moment is then corrected well and the signal hardly. So the error of the share is regressed, and the second moment's
    correction, which has its own regression, scales the signal too.

    Sources. Control variates with an estimated coefficient: Lavenberg and Welch, "A perspective on the use of control
    variables", Management Science 27, 1981. Splitting: Avramidis and Wilson, "A splitting scheme for control variates",
    Operations Research Letters 14, 1993. Positive-part shrinkage: Baranchik, Annals of Mathematical Statistics 41, 1970.
    """

    def __init__(self, num_bins: int, windows: int = 1) -> None:
        self._added = 0
        self._first = torch.zeros(windows, _FOLDS, num_bins, 6, dtype=torch.float64)  # sums of v
        self._second = torch.zeros(windows, _FOLDS, num_bins, 6, 6, dtype=torch.float64)  # of lambda^2 v v^T

    def add(self, sums: PairSums, controls: Tensor, kept: Tensor) -> None:
        """Pool one step of finite sums.

        Args:
            controls: C of the second moment and of the signal, [K, 2], as sums.
            kept: remaining weight of the steps before, [W, K], as `DecayedSums.add` returns it.
        """
        signal = sums.products.diagonal() - sums.squares
        v = torch.stack([sums.squares, sums.count, signal, sums.pairs.diagonal(), *controls.unbind(-1)], dim=-1)  # [K, 6]
        self._first = self._first * kept[:, None, :, None]
        self._second = self._second * (kept**2)[:, None, :, None, None]
        self._first[:, self._added % _FOLDS] += v
        self._second[:, self._added % _FOLDS] += v[:, :, None] * v[:, None]
        self._added += 1

    def estimate(self, sketch: DecayedSums, window: int = 0) -> BinEstimates:
        """Estimate every bin; sketch: without control variates, for products between bins and the lag."""
        plain = sketch.estimate(window)
        coefficients, first = self.coefficients(window), self._first[window]
        # Of few steps a correction may take most of the second moment, or more than all: then it is not made,
        # though E[beta C] = 0 for all corrections alone.
        left = (first[..., _MOMENT] - coefficients.moment * first[..., _OF_MOMENT]).sum(0)
        of_moment = torch.where(left > 0.5 * first[..., _MOMENT].sum(0), coefficients.moment, 0.0)
        taken = torch.zeros(*coefficients.moment.shape, 4, 6, dtype=torch.float64)  # [J, K, 4, 6]: v -> v less beta C
        taken[..., :4] = torch.eye(4, dtype=torch.float64)
        taken[..., _SIGNAL, 4:] = -coefficients.share
        of_share = self._corrected(taken, window)
        # The second moment's correction scales the signal too, so that their ratio stays as corrected above.
        taken[..., _MOMENT, _OF_MOMENT] -= of_moment
        per_moment = of_share.first[:, 1, 0] / of_share.first[:, 0, 0]
        taken[..., _SIGNAL, _OF_MOMENT] -= torch.where(per_moment.isfinite(), per_moment, 0.0) * of_moment
        moments = self._corrected(taken, window)

        matrix, stderr = plain.matrix.clone(), plain.matrix_stderr.clone()
        covariance = moments.covariance
        matrix.diagonal().copy_(moments.ratios[:, 1])
        stderr.diagonal().copy_(covariance[:, 1, 1].sqrt())
        return estimates_of_ratios(
            moments.ratios,
            covariance,
            samples=moments.first[:, 0, 1],
            steps=moments.steps,
            degrees=degrees_of_freedom(moments, sketch.fourth_powers[window]),
            matrix=matrix,
            matrix_stderr=stderr,
            lag=plain.lag,
        )

    def _corrected(self, taken: Tensor, window: int) -> RatioMoments:
        """Moments of second moment and signal from sums of `taken` [J, K, 4, 6] times v."""
        first, second = self._first[window], self._second[window]
        return RatioMoments(
            (taken @ first[..., None]).sum(0).unflatten(-2, (2, 2)).squeeze(-1),
            (taken @ second @ taken.mT).sum(0).unflatten(-2, (2, 2)).unflatten(-1, (2, 2)),
        )

    def coefficients(self, window: int = 0) -> Coefficients:
        """Coefficients of each fold's steps.

        The share of step i errs by x_i = (s_i - S p_i) - r (q_i - Q n_i), with s and q the sums of signal and second
        moment, p and n their weights, S and Q their means over the other folds and r = sum s / sum q. It is regressed on
        the same combination of the control variates, C_s - r C_q, and then on the remainder of C_s, since small
        microbatches, with few pairs, predict the second moment better than the signal.
        """
        others = 1.0 - torch.eye(_FOLDS, dtype=torch.float64)
        first = torch.einsum("fg,gki->fki", others, self._first[window])
        second = torch.einsum("fg,gkij->fkij", others, self._second[window])
        moment, count, signal, pairs = first[..., :4].unbind(-1)
        share = signal / moment
        errors = torch.zeros(*share.shape, 5, 6, dtype=torch.float64)  # [J, K, 5, 6]: v -> q, x and the three regressors
        errors[..., 0, _MOMENT], errors[..., 0, _COUNT] = 1.0, -moment / count
        errors[..., 1, _SIGNAL], errors[..., 1, _PAIRS] = 1.0, -signal / pairs
        errors[..., 1, :] -= share[..., None] * errors[..., 0, :]
        errors[..., 2, _OF_MOMENT] = errors[..., 3, _OF_SIGNAL] = errors[..., 4, _OF_SIGNAL] = 1.0
        errors[..., 3, _OF_MOMENT] = -share
        products = errors @ second @ errors.mT
        steps = torch.stack((count**2 / second[..., _COUNT, _COUNT], pairs**2 / second[..., _PAIRS, _PAIRS]), dim=-1)
        squares = products.diagonal(dim1=-2, dim2=-1)
        known = (steps >= _LEAST_STEPS) & (squares[..., :2] > 0) & (squares[..., 2:4] > 0)  # [J, K, 2]
        # Divided by their spread, large gradients of a bin do not decide; a bin counts by its effective steps.
        weights = torch.where(known, steps / squares[..., :2], 0.0)
        degrees = torch.where(known, steps - 1.0, 0.0).sum(1)

        def product(one: int, other: int, of: int) -> Tensor:
            return torch.where(known[..., of], weights[..., of] * products[..., one, other], 0.0).sum(1)  # [J]

        of_moment = _shrunk(product(0, 2, 0), product(2, 2, 0), product(0, 0, 0), degrees[:, 0])
        joint, square, spread = product(1, 3, 1), product(3, 3, 1), product(1, 1, 1)
        both = _shrunk(joint, square, spread, degrees[:, 1])
        shared = product(3, 4, 1) / square
        rest_square = product(4, 4, 1) - shared * product(3, 4, 1)
        rest_joint = product(1, 4, 1) - shared * joint
        rest = _shrunk(rest_joint, rest_square, spread - joint**2 / square, degrees[:, 1])
        rest = torch.where(rest_square > _LEAST_REST * product(4, 4, 1), rest, 0.0)
        both = both - torch.where(shared.isfinite(), shared, 0.0) * rest
        of_share = torch.stack((-share * both[:, None], (both + rest)[:, None].expand_as(share)), dim=-1)
        return Coefficients(
            torch.where(known[..., 0], of_moment[:, None], 0.0), torch.where(known[..., 1, None], of_share, 0.0)
        )

    def state_dict(self) -> dict:
        """Return plain numbers and lists of them, which JSON holds exactly."""
        return {"added": self._added, "first": self._first.tolist(), "second": self._second.tolist()}

    def load_state_dict(self, state: dict) -> None:
        """Resume from a state of as many bins and windows."""
        self._added = state["added"]
        self._first, self._second = (torch.tensor(state[name], dtype=torch.float64) for name in ("first", "second"))


def _proxy(sums: FreeSums, of_squares: Tensor, of_signal: Tensor) -> Tensor:
    """F of the whole model: the free parts, and the modulation part times multipliers [K] for the token part.

    Returns:
        numerators and weights of the second moment and of the signal, [K, 2, 2].
    """
    own, products = sums.squares[_MODULATION], sums.products.diagonal(dim1=1, dim2=2)
    of_squares, of_signal = of_squares.nan_to_num(), of_signal.nan_to_num()
    # Of each bin with itself alone: nothing is estimated between bins.
    stand_in = of_signal * (products[_MODULATION] - own) + of_squares * own
    squares = sums.squares.sum(0) + of_squares * own
    moment = torch.stack((squares, sums.count), dim=-1)
    signal = torch.stack((products.sum(0) + stand_in - squares, sums.pairs.diagonal()), dim=-1)
    return torch.stack((moment, signal), dim=-2)


def _weighted_sum(weights: Tensor, values: Tensor) -> Tensor:
    """Weighted sum over the bins that have a weight and a finite value."""
    return torch.where((weights > 0) & values.isfinite(), weights * values, 0.0).sum()


def _shrunk(joint: Tensor, square: Tensor, spread: Tensor, degrees: Tensor) -> Tensor:
    """Coefficient of a regression, drawn to 0 as far as it is not significant.

    Args:
        joint, square, spread: of regressor and regressand, of the regressor with itself, and of the regressand.
        degrees: of freedom.
    """
    explained = joint**2 / square
    # What a perfect control variate leaves is rounding, of either sign.
    left = (spread - explained).clamp_min(1e-12 * spread)
    beta = (1.0 - _SHRINKAGE * left / (degrees * explained)).clamp_min(0.0) * joint / square
    return torch.where(beta.isfinite(), beta, 0.0)
