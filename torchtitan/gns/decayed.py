"""Decayed sums over steps, older ones counting less, and noise scales with confidence intervals from them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchtitan.gns.statistics import PairSums, RatioMoments
from torchtitan.statistics.ratio_intervals import fieller
from torchtitan.statistics.student import student_quantile


@dataclass(frozen=True)
class BinEstimates:
    """Noise scales of K timestep bins, averaged over the steps pooled; float64.

    An interval is of the average over these steps. It takes steps as independent and does not cover the drift of the
    noise scale since: the average lags behind by `lag`.

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
        lag: mean age of the pooled pairs, in samples that the bin was trained on since, [K]; NaN without pairs.
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
    lag: Tensor


_QUANTITIES = ("signal", "noise", "b_simple", "lower", "upper", "samples", "lag")


def tags(pattern: str, estimates: Any, quantities: Sequence[str] = _QUANTITIES) -> dict[str, float]:
    """Metrics of the known quantities of every bin; pattern: of their names, with {} for the bin's number."""
    return {
        f"{pattern.format(index)}/{quantity}": value
        for quantity in quantities
        for index, value in enumerate(getattr(estimates, quantity).tolist())
        if math.isfinite(value)
    }


# Half-lives of the windows of which the drift chooses one, as shares of the samples trained so far or of the longest
# half-life, whichever is less.
WINDOW_SHARES = (1.0, 0.5, 0.25, 0.125, 0.0625)

# Fewer effective steps do not tell their own variance.
_LEAST_STEPS = 4.0

# Bins with a smaller share of the median bin's steps have no part in the choice of a window.
_LEAST_SHARE = 0.25


class DecayedSums:
    """Pools the PairSums of steps; a step counts half after the bin was trained on `half_life` further samples.

    n_b further samples of bin b multiply its earlier sums by 0.5^(n_b / half_life), and those of the pair of bins
    (b, c) by the geometric mean of the two factors, whether these samples were measured or not. A bin that was not
    trained on stays unchanged, and the weight of older samples does not depend on how the batch is spread over steps.

    A noise scale drifts, by orders of magnitude early in training, most of all in Adam's geometry. With `shares`, the
    same steps are pooled in several windows, whose half-lives are these shares of the samples trained so far, at most
    of `half_life`; `window` chooses the one to estimate from.
    """

    def __init__(self, num_bins: int, half_life: float, shares: Sequence[float] = ()) -> None:
        """
        Args:
            half_life: in samples of a bin, > 0; infinity: nothing decays.
            shares: of the W windows, falling; none: a single window whose half-life is `half_life` from the beginning.
        """
        self.num_bins = num_bins
        self.half_life = half_life
        self._shares = torch.tensor(shares, dtype=torch.float64)[:, None] if shares else None
        self._seen = torch.zeros(num_bins, dtype=torch.float64)  # samples trained of each bin, none forgotten
        windows = max(len(shares), 1)
        # Ratios (|g|^2 per sample, signal per pair) of each bin; one ratio of each pair of bins.
        self._bins = RatioMoments.of(torch.zeros(windows, num_bins, 2, 2, dtype=torch.float64))
        self._pairs = RatioMoments.of(torch.zeros(windows, num_bins, num_bins, 1, 2, dtype=torch.float64))
        # Of the steps' weights in the signal: fourth powers, and products with the samples trained since.
        self.fourth_powers, self._ages = torch.zeros(2, windows, num_bins, dtype=torch.float64)

    def add(self, sums: PairSums, trained: Tensor | None = None) -> Tensor | None:
        """Pool one step, on the host.

        Args:
            trained: samples of each bin trained since the previous call, [K], those of `sums` included; None: no others.

        Returns:
            remaining weight of the steps before, [W, K]; None where a sum is not finite, and the step left out.
        """
        trained = sums.count if trained is None else trained
        if not sums.is_finite():
            return None
        numerators = sums.products - sums.squares.diag()
        pairs, numerator = sums.pairs.diagonal(), numerators.diagonal()
        per_bin = torch.stack([sums.squares, sums.count, numerator, pairs], dim=-1).unflatten(-1, (2, 2))
        per_pair = torch.stack([numerators, sums.pairs], dim=-1).unsqueeze(-2)  # [K, K, 1, 2]

        kept = kept_share(trained, self._seen, self.half_life, self._shares)  # [W, K]
        self._seen = self._seen + trained
        self._ages = kept * (self._ages + trained * self._bins.first[..., 1, 1])
        self._bins = self._bins.with_step(kept, per_bin)
        self._pairs = self._pairs.with_step((kept[:, :, None] * kept[:, None]).sqrt(), per_pair)
        self.fourth_powers = self.fourth_powers * kept**4 + pairs**4
        return kept

    def window(self) -> int:
        """Window with the least estimated error over all bins, drift included: the same for every bin.

        Let x_w be a bin's signal over its second moment, 1 / (1 + B_simple), in window w, and x_0 that in the shortest
        one that tells its own variance. Since x_0 contains the steps of x_w at about their efficient weights,
        E[(x_w - x_0)^2] = bias_w^2 + V_0 - V_w, so that the squared error bias_w^2 + V_w is (x_w - x_0)^2 + 2 V_w - V_0
        in expectation. It is counted in units of V_0 and averaged over the bins. Rare bins, of less than a quarter of the
        median bin's steps, are left out: short windows hold too few steps of them, which would leave all bins the longest.

        Source: Mallows, "Some comments on C_p", Technometrics 15, 1973, with the shortest window as the full model.
        """
        steps, moments = self._bins.steps, self._bins.ratios
        known = (steps[0] > 0) & moments[0].isfinite().all(-1)
        if not known.any():
            return 0
        known &= steps[0] >= _LEAST_SHARE * steps[0, known].median()
        enough = (steps[:, known] >= _LEAST_STEPS).all(-1).nonzero().flatten().tolist()
        if not enough:
            return 0
        second_moment, signal = moments.unbind(-1)
        share, covariance = signal / second_moment, self._bins.covariance
        variance = covariance[..., 1, 1] - 2.0 * share * covariance[..., 0, 1] + share**2 * covariance[..., 0, 0]
        variance = variance / second_moment**2
        shortest = enough[-1]
        error = ((share - share[shortest]).square() + 2.0 * variance) / variance[shortest]
        error = torch.where(error.isfinite() & known, error, 0.0).sum(-1)
        return min(enough, key=lambda w: error[w].item())

    def sums(self, window: int = 0) -> PairSums:
        """Decayed sums of a window themselves, for `whole_objective` and the like."""
        squares, count = self._bins.first[window, :, 0].unbind(-1)
        numerators, pairs = self._pairs.first[window, :, :, 0].unbind(-1)
        return PairSums(count, squares, numerators + squares.diag(), pairs)

    def estimate(self, window: int = 0) -> BinEstimates:
        """Estimate noise scales from the pooled steps.

        The variances are those between steps, whatever the gradients' distribution and however alike the samples of a
        step are. The interval is Fieller's of E|g|^2 / |G_b|^2 = B_simple + 1 at a quantile of Student's t. The interval
        of the logarithm covers as often, but lies too low where the signal is weak (at a noise scale of 300
        and 1,000 samples nearly all its misses are above it), and says nothing where Fieller's set has a lower bound.
        """
        bins, pairs = (RatioMoments(of.first[window], of.second[window]) for of in (self._bins, self._pairs))
        weight = bins.first[:, 1, 1]
        return estimates_of_ratios(
            bins.ratios,
            bins.covariance,
            samples=bins.first[:, 0, 1],
            steps=bins.steps,
            degrees=degrees_of_freedom(bins, self.fourth_powers[window]),
            matrix=pairs.ratios[..., 0],
            matrix_stderr=pairs.covariance[..., 0, 0].sqrt(),
            lag=torch.where(weight > 0, self._ages[window] / weight, torch.nan),
        )

    def state_dict(self) -> dict:
        """Return plain numbers and lists of them, so that JSON holds the state exactly."""
        return {name: tensor.tolist() for name, tensor in self._tensors().items()}

    def load_state_dict(self, state: dict) -> None:
        """Resume from a state of as many bins; the half-life is this object's own."""
        loaded = {name: torch.tensor(state[name], dtype=torch.float64) for name in self._tensors()}
        self._bins = RatioMoments(loaded["bins_first"], loaded["bins_second"])
        self._pairs = RatioMoments(loaded["pairs_first"], loaded["pairs_second"])
        self.fourth_powers, self._seen, self._ages = loaded["fourth_powers"], loaded["seen"], loaded["ages"]

    def _tensors(self) -> dict[str, Tensor]:
        return {
            "bins_first": self._bins.first,
            "bins_second": self._bins.second,
            "pairs_first": self._pairs.first,
            "pairs_second": self._pairs.second,
            "fourth_powers": self.fourth_powers,
            "ages": self._ages,
            "seen": self._seen,
        }


def narrowest(found: Mapping[str, BinEstimates]) -> str:
    """Name of the estimates with the narrowest valid intervals: the fewest without an upper end, then the least mean
    width of ln(1 + B_simple) over the bins where all have one. Of equally narrow ones, to a thousandth, the first.
    """
    unbounded = {name: int(of.unbounded.sum()) for name, of in found.items()}
    bounded = ~torch.stack([of.unbounded for of in found.values()]).any(0)
    widths = {
        name: (torch.log1p(of.upper[bounded]) - torch.log1p(of.lower[bounded])).sum().item()
        for name, of in found.items() if unbounded[name] == min(unbounded.values())
    }  # fmt: skip
    return next(name for name, width in widths.items() if width <= 1.001 * min(widths.values()))


def degrees_of_freedom(bins: RatioMoments, fourth_powers: Tensor) -> Tensor:
    """Degrees of freedom of the signal's variance [K]: steps - 1 with equal weights p, else Satterthwaite's
    (sum p^2)^2 / sum p^4 - 1.

    Under exponential decay that is half the effective steps of the mean.
    """
    squares = bins.second[:, 1, 1, 1, 1]
    return torch.where(squares > 0, squares**2 / fourth_powers, 0.0) - 1.0


def kept_share(trained: Tensor, seen: Tensor, half_life: float, shares: Tensor | None) -> Tensor:
    """Remaining weight of older steps of each bin after `trained` further samples; arguments as in DecayedSums.

    Returns:
        [W, K], of `shares` [W, 1] or of the one window without them; 1 for a bin that was not trained on.
    """
    longest = seen.clamp(max=half_life) if shares is not None else torch.full_like(seen, half_life)
    half_lives = longest * (1.0 if shares is None else shares)
    return torch.where(trained > 0, 0.5 ** (trained / half_lives), 1.0).expand(1 if shares is None else len(shares), -1)


def estimates_of_ratios(
    ratios: Tensor,
    covariance: Tensor,
    *,
    samples: Tensor,
    steps: Tensor,
    degrees: Tensor,
    matrix: Tensor,
    matrix_stderr: Tensor,
    lag: Tensor,
) -> BinEstimates:
    """Noise scales of the second moment E|g|^2 and the signal |G_b|^2, with Fieller's intervals of 95 % each.

    Args:
        ratios: (second moment, signal) of each bin, [K, 2].
    """
    second_moment, signal = ratios.unbind(-1)
    var_moment, var_signal, joint = covariance[:, 0, 0], covariance[:, 1, 1], covariance[:, 0, 1]
    quantile = student_quantile(0.975, degrees)
    lower, upper, unbounded = fieller(second_moment, signal, var_moment, var_signal, joint, quantile)
    noise = second_moment - signal
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
        lag=lag,
    )
