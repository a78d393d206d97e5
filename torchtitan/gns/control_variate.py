"""Estimates from measured steps with control variates: quantities of mean zero that tell some of a step's error.

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

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchtitan.gns.decayed import BinEstimates, degrees_of_freedom, estimates_of_ratios, kept_share
from torchtitan.gns.statistics import PairSums, RatioMoments

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
class Coefficients:
    """Coefficients of each fold's steps from the other folds; float64, J folds.

    Attributes:
        moment: of the second moment's C, taken from the second moment, [J, K].
        share: of C of the second moment and of the signal, taken from the signal to correct its share of the second
            moment, [J, K, 2].
    """

    moment: Tensor
    share: Tensor


class ControlledSums:
    """Pools measured steps with their control variates, in the windows of DecayedSums."""

    def __init__(self, num_bins: int, half_life: float, shares: Sequence[float] = ()) -> None:
        """Arguments as of DecayedSums."""
        self._half_life, windows = half_life, max(len(shares), 1)
        self._shares = torch.tensor(shares, dtype=torch.float64)[:, None] if shares else None
        self._seen = torch.zeros(num_bins, dtype=torch.float64)
        self._added = 0
        self._first = torch.zeros(windows, _FOLDS, num_bins, 6, dtype=torch.float64)  # sums of v
        self._second = torch.zeros(windows, _FOLDS, num_bins, 6, 6, dtype=torch.float64)  # of lambda^2 v v^T
        self._fourth_powers = torch.zeros(windows, num_bins, dtype=torch.float64)

    def add(self, sums: PairSums, controls: Tensor, trained: Tensor | None = None) -> None:
        """Pool one step of finite sums.

        Args:
            controls: C of the second moment and of the signal, [K, 2], as sums.
            trained: see DecayedSums.
        """
        trained = sums.count if trained is None else trained
        pairs = sums.pairs.diagonal()
        signal = sums.products.diagonal() - sums.squares
        v = torch.cat([torch.stack([sums.squares, sums.count, signal, pairs], dim=-1), controls], dim=-1)  # [K, 6]
        kept = kept_share(trained, self._seen, self._half_life, self._shares)  # [W, K]
        self._seen = self._seen + trained
        self._first = self._first * kept[:, None, :, None]
        self._second = self._second * (kept**2)[:, None, :, None, None]
        self._first[:, self._added % _FOLDS] += v
        self._second[:, self._added % _FOLDS] += v[:, :, None] * v[:, None]
        self._fourth_powers = self._fourth_powers * kept**4 + pairs**4
        self._added += 1

    def estimate(self, plain: BinEstimates, window: int = 0) -> BinEstimates:
        """Estimate every bin.

        Args:
            plain: estimates of the same steps in the same window without control variates, for the inner products
                between bins and the lag.
            window: index.
        """
        coefficients = self.coefficients(window)
        taken = torch.zeros(*coefficients.moment.shape, 4, 6, dtype=torch.float64)  # [J, K, 4, 6]: v -> v less beta C
        taken[..., :4] = torch.eye(4, dtype=torch.float64)
        taken[..., _SIGNAL, 4:] = -coefficients.share
        of_share = self._corrected(taken, window)
        # The second moment's correction scales the signal too, so that their ratio stays as corrected above.
        taken[..., _MOMENT, _OF_MOMENT] -= coefficients.moment
        per_moment = of_share.first[:, 1, 0] / of_share.first[:, 0, 0]
        taken[..., _SIGNAL, _OF_MOMENT] -= torch.where(per_moment.isfinite(), per_moment, 0.0) * coefficients.moment
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
            degrees=degrees_of_freedom(moments, self._fourth_powers[window]),
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
        return {"added": self._added} | {name: tensor.tolist() for name, tensor in self._tensors().items()}

    def load_state_dict(self, state: dict) -> None:
        """Resume from a state of as many bins and windows."""
        found = {name: torch.tensor(state[name], dtype=torch.float64) for name in self._tensors()}
        self._added, self._seen, self._fourth_powers = state["added"], found["seen"], found["fourth_powers"]
        self._first, self._second = found["first"], found["second"]

    def _tensors(self) -> dict[str, Tensor]:
        return {
            "first": self._first, "second": self._second, "fourth_powers": self._fourth_powers, "seen": self._seen,
        }  # fmt: skip


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
