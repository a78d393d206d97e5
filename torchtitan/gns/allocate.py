"""Allocate samples to timestep bins by gradient noise: shares, predicted savings and their confidence intervals.

The objective is fixed: sum over K bins of pi_b E[weighted loss in bin b], with pi_b the bin's mass in the objective's
own density. Drawing a share q_b of the samples from bin b, with importance weights pi_b / q_b, leaves the mean gradient
as it is and changes its variance. S_b = tr Sigma_b and |G_b|^2 are noise and signal of gradients of single samples'
weighted losses, before importance weights. Within a bin, timesteps follow the objective's own density throughout, so a
density of another shape within its bins counts here by its shares only.

Less variance is not less loss: it matters where the batch is below the noise scale.
"""

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from torchtitan.gns.decayed import BinEstimates

# Names of samplers, and what changing to each means.
NEYMAN = "neyman"
STRATIFIED = "stratified"
FROM_WEIGHT = "from_weight"
CHANGES = {
    NEYMAN: "drawing t in proportion to the measured noise, with importance weights,",
    STRATIFIED: "stratified timesteps",
    FROM_WEIGHT: "drawing t from the weight instead of multiplying by it",
    "loss_second_moment": "drawing t in proportion to the root mean square loss, with importance weights,",
    "uniform": "drawing t uniformly, with importance weights,",
    "logit_normal": "drawing t from a logit-normal density, with importance weights,",
}

_DRAWS = 1000  # of the bootstrap
_CONFIDENCE = 0.95  # of each interval by itself
WORTHWHILE = 1.1  # a smaller factor is not worth a change, however certain


class PredictedRatio(NamedTuple):
    """Gradient variance of a sampler of t over that of the present one, with its confidence interval.

    Equal to the ratio of the samples that the two need for the same variance. Unknown: NaN in (0, inf).
    """

    name: str
    ratio: float
    lower: float
    upper: float


# ---------------------------------------------------------------------- shares of samplers


def neyman_shares(mass: Tensor, noise: Tensor, signal: Tensor | None = None, floor: float = 0.1) -> Tensor:
    """Shares of the samples with the least gradient variance, mixed with `floor` of the objective's own masses.

    Proportional to pi_b sqrt(S_b) where every batch holds fixed counts of each bin (stratified timesteps), and to
    pi_b sqrt(S_b + |G_b|^2) where timesteps are drawn independently. Importance weights are at most 1 / floor.

    A bin without a usable value (negative, NaN, infinite) keeps its own mass, and the others share the remaining mass.
    All bins keep theirs if no value is usable, or if all are 0.

    Args:
        mass: pi_b, [K], summing to 1.
        noise: S_b, [..., K].
        signal: |G_b|^2, [..., K], for independent draws; None for stratified ones.
        floor: 0 < floor <= 1.

    Returns:
        q_b, float64 [..., K], summing to 1; 0 only where the mass is.

    Raises:
        ValueError: the masses are negative or do not sum to 1.

    Source: Neyman, "On the two different aspects of the representative method", J. R. Statist. Soc. 97, 1934.
    """
    mass = _checked_mass(mass)
    moment = noise.to(mass) if signal is None else noise.to(mass) + signal.to(mass)
    usable = moment.isfinite() & (moment >= 0)
    wanted = mass * torch.where(usable, moment, 0.0).sqrt()
    total, free = wanted.sum(-1, keepdim=True), (mass * usable).sum(-1, keepdim=True)
    best = torch.where(usable & (total > 0), free * wanted / total, mass)
    return floor * mass + (1.0 - floor) * best


def weight_shares(mass: Tensor, mean_multiplier: Tensor) -> Tensor:
    """Shares of a density proportional to the loss multiplier: pi_b x its mean in the bin, normalised; float64 [K].

    Such a sampler divides the multiplier out again, so that every sample counts the same.
    """
    mass = _checked_mass(mass)
    product = mass * mean_multiplier.to(mass)
    return product / product.sum()


def _checked_mass(mass: Tensor) -> Tensor:
    mass = mass.detach().to("cpu", torch.float64)
    if not (mass.numel() and (mass >= 0).all() and abs(mass.sum().item() - 1.0) <= 1e-6):
        raise ValueError(f"the bins' masses {mass.tolist()} must not be negative and must sum to 1")
    return mass


# ---------------------------------------------------------------------- variances


def gradient_variance(
    mass: Tensor,
    shares: Tensor,
    noise: Tensor,
    signal: Tensor | None = None,
    whole_signal: Tensor | float = 0.0,
    *,
    stratified: bool,
) -> Tensor:
    """Variance of the mean gradient, times the number of samples in the mean; float64 [...].

        stratified:   sum_b pi_b^2 S_b / q_b
        independent:  sum_b pi_b^2 (S_b + |G_b|^2) / q_b - |G|^2

    Args:
        noise, signal: S_b and |G_b|^2, [..., K]; the signal is needed for independent draws.
        whole_signal: |G|^2 of G = sum_b pi_b G_b, [...].
        stratified: whether every batch holds its shares of the bins exactly.

    Returns:
        the variance; infinite where a bin of noise gets no samples.

    Raises:
        ValueError: independent draws without a signal.
    """
    mass = _checked_mass(mass)
    subtracted: Tensor | float
    if stratified:
        moment, subtracted = noise.to(mass), 0.0
    elif signal is None:
        raise ValueError("the gradient variance of independent draws needs the bins' signal")
    else:
        moment, subtracted = noise.to(mass) + signal.to(mass), whole_signal
    known_zero = (mass == 0) | (moment == 0)
    terms = torch.where(known_zero, 0.0, mass**2 * moment / shares.to(mass))
    return terms.sum(-1) - subtracted


def predicted_ratios(
    mass: Tensor,
    measured: BinEstimates,
    others: Mapping[str, Tensor] | None = None,
    *,
    stratified: bool,
    present: Tensor | None = None,
    floor: float = 0.1,
) -> list[PredictedRatio]:
    """Gradient variance of other samplers of t over that of the present one.

    Shares chosen by the measured noise look better by that measurement than they are. So the intervals are a parametric
    bootstrap of the whole procedure: the measured values are taken for the truth, measurements with normal errors are
    simulated, shares are chosen by each, and the predicted gain of these shares is compared with their true one. The
    ratio returned has the median of that error removed. The errors of noise and signal are taken as independent. The
    work is bounded and the seed fixed: equal arguments give equal results.

    Args:
        measured: noise and signal with standard errors, of gradients without importance weights.
        others: samplers' shares by name, [K] each, which do not depend on the measurement.
        stratified: whether the present sampler gives every batch its shares of the bins.
        present: shares of the present sampler, [K]; None: the masses.

    Returns:
        "neyman"; "stratified", the present shares with fixed counts, unless they are so already; the others.
    """
    mass = _checked_mass(mass)
    present = mass if present is None else present.to(mass)
    truth = _Moments.of(mass, measured)
    fakes = truth.perturbed(mass, measured)

    def neyman(moments: _Moments) -> Tensor:
        return neyman_shares(mass, moments.noise, None if stratified else moments.signal, floor)

    # Of each sampler: its shares by what was measured, those by what was made up, and whether counts are fixed.
    samplers: dict[str, tuple[Tensor, Tensor, bool]] = {NEYMAN: (neyman(truth), neyman(fakes), stratified)}
    if not stratified:
        samplers[STRATIFIED] = (present, present, True)
    for name, shares in (others or {}).items():
        samplers[name] = (shares.to(mass), shares.to(mass), stratified)

    def log_ratio(shares: Tensor, fixed_counts: bool, moments: _Moments) -> Tensor:
        new = moments.variance(mass, shares, fixed_counts)
        old = moments.variance(mass, present, stratified)
        return torch.where((new > 0) & (old > 0), new.log() - old.log(), torch.nan)

    results = []
    for name, (shares, fake_shares, fixed_counts) in samplers.items():
        promised = log_ratio(shares, fixed_counts, truth).item()
        errors = log_ratio(fake_shares, fixed_counts, truth) - log_ratio(fake_shares, fixed_counts, fakes)
        results.append(_with_interval(name, promised, errors))
    return results


class _Moments(NamedTuple):
    noise: Tensor  # [..., K]
    signal: Tensor  # [..., K]
    whole_signal: Tensor  # [...]

    @classmethod
    def of(cls, mass: Tensor, measured: BinEstimates) -> "_Moments":
        matrix = measured.matrix.to(mass)
        return cls(measured.noise.to(mass), measured.signal.to(mass), _by_pairs(mass, matrix).sum())

    def perturbed(self, mass: Tensor, measured: BinEstimates) -> "_Moments":
        """Simulated measurements with normal errors around these, [D, K]."""
        generator = torch.Generator().manual_seed(0)
        normal = torch.randn(_DRAWS, 2 * len(mass) + 1, generator=generator, dtype=torch.float64)
        for_noise, for_signal, for_whole = normal.split((len(mass), len(mass), 1), dim=1)
        share = _by_pairs(mass, measured.matrix_stderr.to(mass))
        whole_stderr = (2.0 * share.square().sum() - share.diagonal().square().sum()).sqrt()  # M_bc and M_cb are one
        return _Moments(
            self.noise + measured.noise_stderr.to(mass) * for_noise,
            self.signal + measured.signal_stderr.to(mass) * for_signal,
            self.whole_signal + whole_stderr * for_whole.squeeze(1),
        )

    def variance(self, mass: Tensor, shares: Tensor, stratified: bool) -> Tensor:
        return gradient_variance(mass, shares, self.noise, self.signal, self.whole_signal, stratified=stratified)


def _by_pairs(mass: Tensor, matrix: Tensor) -> Tensor:
    weights = torch.outer(mass, mass)
    return torch.where(weights == 0, 0.0, weights * matrix)  # an unknown value of weight 0 does no harm


def _with_interval(name: str, promised: float, errors: Tensor) -> PredictedRatio:
    tail = 0.5 * (1.0 - _CONFIDENCE)
    valid = errors[errors.isfinite()]
    if not math.isfinite(promised) or len(valid) < (1.0 - tail) * len(errors):
        return PredictedRatio(name, math.nan, 0.0, math.inf)
    places = torch.tensor([tail, 0.5, 1.0 - tail], dtype=torch.float64)
    lower, ratio, upper = torch.exp(promised + torch.quantile(valid, places)).tolist()
    return PredictedRatio(name, ratio, lower, upper)


# ---------------------------------------------------------------------- advice


def sampler_advice(ratios: Iterable[PredictedRatio]) -> str | None:
    """Advice on the timestep sampler in one line: which one would save samples; None where none is worth a change.

    A change is recommended only where its interval excludes a ratio of 1 and it saves a factor of 1.1; a loss multiplier
    that wastes samples comes first, since nothing has to be measured to leave it out.
    """
    better = {ratio.name: ratio for ratio in ratios if ratio.upper < 1.0 and ratio.ratio <= 1.0 / WORTHWHILE}
    if FROM_WEIGHT in better:
        text = f"the loss multiplier wastes samples: {_saving(better[FROM_WEIGHT])}"
        if NEYMAN in better and better[NEYMAN].upper < better[FROM_WEIGHT].lower:
            text += f"; {_saving(better[NEYMAN])}"
        return text
    return _saving(min(better.values(), key=lambda r: r.ratio)) if better else None


def _saving(ratio: PredictedRatio) -> str:
    saved, least, most = (1.0 / value if value > 0 else math.inf for value in (ratio.ratio, ratio.upper, ratio.lower))
    digits = 1 if least >= 1.15 else 2
    fewer = f"{saved:.{digits}f}x [{least:.{digits}f}, {most:.{digits}f}] fewer samples"
    return f"{CHANGES[ratio.name]} would give the same gradient variance with {fewer}"


# ---------------------------------------------------------------------- when to change


class SharesSchedule:
    """Schedule of the sampling shares of a run: they change rarely, after a warm-up, and only for a significant gain.

    A change is considered after `warmup` samples, and then every `interval` steps. It is made if the Neyman shares by
    the newest measurement would need `least_gain` times fewer samples than the shares in use, and significantly fewer
    (the interval excludes 1). Call `update` after a step, and use its answer from the next step on: shares must not
    depend on the samples that they draw.
    """

    def __init__(
        self, mass: Tensor, *, warmup: int, interval: int, least_gain: float = 1.05, floor: float = 0.1
    ) -> None:
        """
        Args:
            mass: pi_b, [K]: the shares to begin with.
            warmup: samples of the run before the first change.
            interval: steps between considered changes.
            least_gain: factor of samples that a change must save by prediction.
        """
        self._mass = _checked_mass(mass)
        self._warmup, self._interval, self._least_gain, self._floor = warmup, interval, least_gain, floor
        self.shares = self._mass.tolist()
        self.considered_at: int | None = None  # step

    def update(self, step: int, samples: int, measured: BinEstimates, *, stratified: bool) -> list[float] | None:
        """New shares from step + 1 on, or None; measured: without importance weights, equal on all ranks."""
        if samples < self._warmup:
            return None
        if self.considered_at is not None and step - self.considered_at < self._interval:
            return None
        self.considered_at = step
        present = torch.tensor(self.shares, dtype=torch.float64)
        gain = predicted_ratios(self._mass, measured, stratified=stratified, present=present, floor=self._floor)[0]
        if not (gain.upper < 1.0 and gain.ratio <= 1.0 / self._least_gain):
            return None
        signal = None if stratified else measured.signal
        self.shares = neyman_shares(self._mass, measured.noise, signal, self._floor).tolist()
        return list(self.shares)

    def state_dict(self) -> dict:
        """Return the state as plain numbers, which JSON holds exactly."""
        return {"shares": list(self.shares), "considered_at": self.considered_at}

    def load_state_dict(self, state: dict) -> None:
        """Resume from a state of as many bins."""
        self.shares, self.considered_at = list(state["shares"]), state["considered_at"]
