"""Estimates from measured steps with control variates: quantities of mean zero that tell some of a step's error.

A step's sums n (over pairs, for the signal, or samples, for the second moment) with a control variate C, of which
E[C] = 0 given the counts, are replaced by n - beta C. The best beta is the regression of n on C. Fitted on the steps
that it is applied to, it would bias the estimate, since it depends on their C. So the steps are dealt to J folds, and
those of one fold have the beta of the other folds: E[beta C] = E[beta] E[C] = 0, whatever the beta. Some twenty steps tell
a bin's own beta poorly, and what a step's free pairs say is much alike in all bins: one beta is fitted to all of them. It is
drawn to 0, to the sums themselves, as far as it is not significant, so that a useless control variate costs about nothing.

Sources. Control variates with an estimated coefficient: Lavenberg and Welch, "A perspective on the use of control
variables", Management Science 27, 1981. Splitting: Avramidis and Wilson, "A splitting scheme for control variates",
Operations Research Letters 14, 1993. Positive-part shrinkage: Baranchik, Annals of Mathematical Statistics 41, 1970.
"""

from collections.abc import Sequence

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

# Of a step's vector v: (sum, weight) of the second moment, of the signal, and the two control variates.
_SUMS, _WEIGHTS, _CONTROLS = [0, 2], [1, 3], [4, 5]


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
            sums: of the step.
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
        first, second = self._first[window], self._second[window]
        taken = torch.zeros(*first.shape[:2], 4, 6, dtype=torch.float64)  # [J, K, 4, 6]: v -> v less beta C
        taken[..., :4] = torch.eye(4, dtype=torch.float64)
        for place, row in enumerate(_SUMS):
            taken[..., row, _CONTROLS[place]] = -self.coefficients(window)[..., place]
        moments = RatioMoments(
            (taken @ first[..., None]).sum(0).unflatten(-2, (2, 2)).squeeze(-1),
            (taken @ second @ taken.mT).sum(0).unflatten(-2, (2, 2)).unflatten(-1, (2, 2)),
        )
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

    def coefficients(self, window: int = 0) -> Tensor:
        """Coefficients beta of each fold's steps, from the other folds: of second moment and signal, [J, K, 2]."""
        others = 1.0 - torch.eye(_FOLDS, dtype=torch.float64)
        first = torch.einsum("fg,gki->fki", others, self._first[window])
        second = torch.einsum("fg,gkij->fkij", others, self._second[window])
        of_sums, of_weights, of_controls = (first[..., places] for places in (_SUMS, _WEIGHTS, _CONTROLS))
        level = of_sums / of_weights

        def moment(one: list[int], other: list[int]) -> Tensor:
            return second[..., one, other]

        weights = moment(_WEIGHTS, _WEIGHTS)
        steps = of_weights**2 / weights
        squares = moment(_CONTROLS, _CONTROLS)
        joint = moment(_CONTROLS, _SUMS) - level * moment(_CONTROLS, _WEIGHTS)
        spread = moment(_SUMS, _SUMS) - 2.0 * level * moment(_SUMS, _WEIGHTS) + level**2 * weights
        known = (steps >= _LEAST_STEPS) & of_controls.isfinite() & (squares > 0) & (spread > 0)
        # Divided by their spread, large gradients of a bin do not decide; a bin counts by its effective steps.
        shares = torch.where(known, steps / spread, 0.0)
        joint, squares, spread = (torch.where(known, shares * of, 0.0).sum(1) for of in (joint, squares, spread))  # [J, 2]
        explained = joint**2 / squares
        # What a perfect control variate leaves is rounding, of either sign.
        left = (spread - explained).clamp_min(1e-12 * spread)
        degrees = torch.where(known, steps - 1.0, 0.0).sum(1)
        beta = (1.0 - _SHRINKAGE * left / (degrees * explained)).clamp_min(0.0) * joint / squares
        return torch.where(known & beta.isfinite()[:, None], beta[:, None], 0.0)

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
