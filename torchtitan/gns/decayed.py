"""Decayed sums over steps, older ones counting less, and noise scales with confidence intervals from them."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from torchtitan.gns.statistics import PairSums, RatioMoments
from torchtitan.statistics.ratio_intervals import fieller
from torchtitan.statistics.student import student_quantile


@dataclass(frozen=True)
class BinEstimates:
    """Noise scales of K timestep bins, averaged over the steps pooled; float64.

    An interval is of the average over these steps. It takes steps as independent, so it does not know that the
    noise scale drifts: an average of half-life h lags behind by about 1.4 h samples of the bin.

    Attributes:
        signal, noise: |G_b|^2, which may be negative, and tr Sigma_b, [K]; NaN without pairs.
        b_simple: noise / signal in samples, [K].
        lower, upper: confidence interval of the noise scale, [K]; 0 <= lower since no noise is negative.
        unbounded: [K] bool, the signal is not significantly above zero: the noise scale is "greater than lower", upper
            is infinite and b_simple means nothing.
        samples: samples pooled, older ones counting less, [K].
        steps: equally weighted steps that the pooled ones are worth, [K].
        signal_stderr, noise_stderr: standard errors, [K]; infinite below two steps.
        matrix: M_bc = G_b . G_c with the signal on the diagonal, [K, K]; NaN where no pair was seen.
        matrix_stderr: its standard errors, [K, K].
    """

    signal: Tensor
    noise: Tensor
    b_simple: Tensor
    lower: Tensor
    upper: Tensor
    unbounded: Tensor
    samples: Tensor
    steps: Tensor
    signal_stderr: Tensor
    noise_stderr: Tensor
    matrix: Tensor
    matrix_stderr: Tensor


class DecayedSums:
    """Pools the PairSums of steps; a sample counts half after `half_life` further samples of its bin.

    A step's n_b samples multiply the earlier sums of bin b by 0.5^(n_b / half_life), and those of the pair of bins
    (b, c) by the geometric mean of the two factors. A bin without samples in a step stays unchanged, and the weight of
    older samples does not depend on how the batch is spread over steps.

    Early in training gradients change by orders of magnitude, most of all in Adam's geometry. With `ramp`, the half-life
    is at most that share of the samples seen so far, so that the first steps do not outweigh the later ones for long.

    `skipped` counts steps left out because a sum was not finite.
    """

    def __init__(self, num_bins: int, half_life: float, ramp: float = math.inf) -> None:
        """
        Args:
            num_bins: K.
            half_life: in samples of a bin, > 0; infinity: nothing decays.
            ramp: > 0; the half-life is at most this times the samples of the bin seen before; infinity: no limit.
        """
        if not half_life > 0:
            raise ValueError(f"half_life is {half_life:g} samples, must be positive")
        self.num_bins = num_bins
        self.half_life = half_life
        self.ramp = ramp
        self.skipped = 0
        self._seen = torch.zeros(num_bins, dtype=torch.float64)  # samples of each bin, none forgotten
        # Ratios (|g|^2 per sample, signal per pair) of each bin; one ratio of each pair of bins.
        self._bins = RatioMoments.of(torch.zeros(num_bins, 2, 2, dtype=torch.float64))
        self._pairs = RatioMoments.of(torch.zeros(num_bins, num_bins, 1, 2, dtype=torch.float64))
        self._fourth_powers = torch.zeros(num_bins, dtype=torch.float64)  # of the steps' weights in the signal

    def add(self, sums: PairSums) -> None:
        """Pool one step; it is left out, and counted in `skipped`, if any sum is not finite."""
        sums = sums.to("cpu")
        if not sums.is_finite():
            self.skipped += 1
            return
        numerators = sums.products - sums.squares.diag()
        pairs, numerator = sums.pairs.diagonal(), numerators.diagonal()
        per_bin = torch.stack([sums.squares, sums.count, numerator, pairs], dim=-1).unflatten(-1, (2, 2))
        per_pair = torch.stack([numerators, sums.pairs], dim=-1).unsqueeze(-2)  # [K, K, 1, 2]

        kept = kept_share(sums.count, self._seen, self.half_life, self.ramp)
        self._seen = self._seen + sums.count
        self._bins = self._bins.decayed(kept) + RatioMoments.of(per_bin)
        self._pairs = self._pairs.decayed(torch.outer(kept, kept).sqrt()) + RatioMoments.of(per_pair)
        self._fourth_powers = self._fourth_powers * kept**4 + pairs**4

    def sums(self) -> PairSums:
        """Decayed sums themselves, for `whole_objective` and the like."""
        squares, count = self._bins.first[:, 0].unbind(-1)
        numerators, pairs = self._pairs.first[:, :, 0].unbind(-1)
        return PairSums(count, squares, numerators + squares.diag(), pairs)

    def estimate(self, confidence: float = 0.95) -> BinEstimates:
        """Estimate noise scales from the pooled steps.

        The variances are those between steps, whatever the gradients' distribution and however alike the samples of a
        step are. The interval is Fieller's of E|g|^2 / |G_b|^2 = B_simple + 1 at a quantile of Student's t. The interval
        of the logarithm (`log_delta`) covers as often, but lies too low where the signal is weak (at a noise scale of 300
        and 1,000 samples nearly all its misses are above it), and says nothing where Fieller's set has a lower bound.

        Args:
            confidence: of each bin's interval by itself.
        """
        return estimates_of_ratios(
            self._bins.ratios,
            self._bins.covariance,
            samples=self._bins.first[:, 0, 1],
            steps=self._bins.steps,
            degrees=self._degrees_of_freedom(),
            matrix=self._pairs.ratios[..., 0],
            matrix_stderr=self._pairs.covariance[..., 0, 0].sqrt(),
            confidence=confidence,
        )

    def _degrees_of_freedom(self) -> Tensor:
        """Degrees of freedom of the signal's variance [K]: steps - 1 with equal weights p, else Satterthwaite's
        (sum p^2)^2 / sum p^4 - 1.

        Under exponential decay that is half the effective steps of the mean.
        """
        squares = self._bins.second[:, 1, 1, 1, 1]
        return torch.where(squares > 0, squares**2 / self._fourth_powers, 0.0) - 1.0

    def state_dict(self) -> dict:
        """Return plain numbers and lists of them, so that JSON holds the state exactly."""
        tensors = {name: tensor.tolist() for name, tensor in self._tensors().items()}
        return {"num_bins": self.num_bins, "skipped": self.skipped, **tensors}

    def load_state_dict(self, state: dict) -> None:
        """Resume from a state; the half-life is this object's own.

        Raises:
            ValueError: the state is of another number of bins.
        """
        if state["num_bins"] != self.num_bins:
            raise ValueError(f"the state is of {state['num_bins']} timestep bins, this run has {self.num_bins}")
        loaded = {name: torch.tensor(state[name], dtype=torch.float64) for name in self._tensors()}
        self.skipped = state["skipped"]
        self._bins = RatioMoments(loaded["bins_first"], loaded["bins_second"])
        self._pairs = RatioMoments(loaded["pairs_first"], loaded["pairs_second"])
        self._fourth_powers, self._seen = loaded["fourth_powers"], loaded["seen"]

    def _tensors(self) -> dict[str, Tensor]:
        return {
            "bins_first": self._bins.first,
            "bins_second": self._bins.second,
            "pairs_first": self._pairs.first,
            "pairs_second": self._pairs.second,
            "fourth_powers": self._fourth_powers,
            "seen": self._seen,
        }


def kept_share(count: Tensor, seen: Tensor, half_life: float, ramp: float) -> Tensor:
    """Weight of older samples of each bin after `count` further ones; arguments as in DecayedSums, [K] each."""
    limit = torch.full_like(seen, half_life) if math.isinf(ramp) else (ramp * seen).clamp(max=half_life)
    return torch.where(count > 0, 0.5 ** (count / limit), 1.0)


def estimates_of_ratios(
    ratios: Tensor,
    covariance: Tensor,
    *,
    samples: Tensor,
    steps: Tensor,
    degrees: Tensor,
    matrix: Tensor | None = None,
    matrix_stderr: Tensor | None = None,
    confidence: float = 0.95,
) -> BinEstimates:
    """Noise scales of the second moment E|g|^2 and the signal |G_b|^2, with Fieller's intervals.

    Args:
        ratios: (second moment, signal) of each bin, [K, 2].
        covariance: of the two, [K, 2, 2].
        samples, steps: pooled in them, [K].
        degrees: of freedom of the variances, [K].
        matrix, matrix_stderr: of inner products between bins, [K, K]; NaN and infinite where not given.
        confidence: of each interval by itself.
    """
    second_moment, signal = ratios.unbind(-1)
    var_moment, var_signal, joint = covariance[:, 0, 0], covariance[:, 1, 1], covariance[:, 0, 1]
    quantile = student_quantile(0.5 + 0.5 * confidence, degrees)
    lower, upper, unbounded = fieller(second_moment, signal, var_moment, var_signal, joint, quantile)
    noise = second_moment - signal
    if matrix is None or matrix_stderr is None:
        matrix = torch.full((len(signal), len(signal)), torch.nan, dtype=torch.float64)
        matrix_stderr = torch.full_like(matrix, torch.inf)
    return BinEstimates(
        signal=signal,
        noise=noise,
        b_simple=noise / signal,
        lower=(lower - 1.0).clamp_min(0.0),
        upper=(upper - 1.0).clamp_min(0.0),
        unbounded=unbounded,
        samples=samples,
        steps=steps,
        signal_stderr=var_signal.sqrt(),
        noise_stderr=(var_moment + var_signal - 2.0 * joint).clamp_min(0.0).sqrt(),
        matrix=matrix,
        matrix_stderr=matrix_stderr,
    )
