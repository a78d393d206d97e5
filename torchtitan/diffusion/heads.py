"""Heads: several predictions by one network, their training and their combination.

The network outputs K images for each of its inputs, one for each prediction. A rule selects the heads that a sample
trains, and the shares, functions of the noise level alone, by which their estimates of x0 are added.

Source: Xie and Agam, "Rethinking timesteps samplers and prediction types", arXiv 2502.01990, where the least of the raw
errors is trained; the other rules are meant to correct its failure.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan.diffusion.paths import Path, per_image
from torchtitan.diffusion.predictions import PREDICTIONS, noise_error_factor, target, to_x0_and_noise
from torchtitan.diffusion.uncertainty import LogUncertainty
from torchtitan.settings import setting

HEADS = tuple(name for name in PREDICTIONS if name != "edm")  # whose target goes by sigma_data, a key of one prediction
# Where the errors of rules that compare them are remembered: steps of 1/4 in ln sigma.
_LOG_SIGMA_ENDS, _NUM_EDGES = (-8.0, 8.0), 65
_HALF_LIFE = 20_000  # samples
# Beyond these no float32 timestep lies.
_LOG_SIGMA_RANGE = (-40.0, 17.0)


class HeadErrors(NamedTuple):
    """Mean squared errors of the heads [B, K]: raw, of the prediction of each head; common, of `objective.prediction`."""

    raw: Tensor
    common: Tensor


class CombinationRule(nn.Module):
    """Rule for training and combining heads, by the error of `objective.prediction` if `of_one_error`."""

    of_one_error = True

    def loss(self, errors: HeadErrors, log_sigma: Tensor) -> tuple[Tensor, Tensor]:
        """Loss before its weight, [B], and each head's share, [B, K], without gradient.

        The share is that of the loss where heads compete for a sample, and of the mix where all of them train.
        """
        raise NotImplementedError

    def shares(self, log_sigma: Tensor) -> Tensor:
        """Shares of the heads' estimates in the combined one, at ln sigma [N]: [N, K], each row sums to 1."""
        raise NotImplementedError

    def least_conversion(self, conversion: Tensor, log_sigma: Tensor) -> Tensor:
        """Least weight of an error of 1 in the outputs of the heads that train at ln sigma [N], [N].

        Args:
            conversion: (trained error) / (error of each head), [N, K].
        """
        return conversion.amin(1)

    def observe(self, errors: HeadErrors, log_sigma: Tensor) -> None:
        """Observe a microbatch, for rules that use earlier errors."""

    def update(self, skip: Tensor) -> None:
        """Update after a whole global batch; skip: the optimizer leaves it out, bool scalar. Collective."""


class RunningErrors(nn.Module):
    """Mean error of each head by noise level, over some of the latest samples.

    An error loses half of its weight with every 20,000 samples. Levels of a weight below 1 use the nearest with more.
    """

    edges: Tensor
    sums: Tensor
    weight: Tensor

    def __init__(self, heads: int) -> None:
        super().__init__()
        bins = _NUM_EDGES + 1
        edges = torch.linspace(*_LOG_SIGMA_ENDS, _NUM_EDGES, dtype=torch.float64)
        self.register_buffer("edges", edges, persistent=False)
        self.register_buffer("sums", torch.zeros(heads, bins, dtype=torch.float64))
        self.register_buffer("weight", torch.zeros(bins, dtype=torch.float64))
        self._seen: Tensor | None = None  # [1 + K, bins] of the step under way

    def observe(self, errors: Tensor, log_sigma: Tensor) -> None:
        """Observe a microbatch: errors [B, K] at ln sigma [B]."""
        if self._seen is None:
            self._seen = torch.zeros(1 + len(self.sums), len(self.weight), dtype=torch.float64, device=errors.device)
        bins = torch.bucketize(log_sigma.to(torch.float64), self.edges)
        errors = errors.detach().to(torch.float64)
        finite = errors.isfinite().all(1, keepdim=True)
        rows = torch.cat((finite.to(torch.float64), torch.where(finite, errors, 0.0)), dim=1)  # [B, 1 + K]
        membership = F.one_hot(bins, len(self.weight)).to(torch.float64)  # a product's sum has one order, on a GPU too
        self._seen += rows.T @ membership

    def update(self, skip: Tensor) -> None:
        """Update after a whole global batch: add the observed errors, unless `skip`; collective."""
        seen, self._seen = self._seen, None
        assert seen is not None, "update() without observe()"
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(seen)
        seen = torch.where(skip, 0.0, seen)
        decay = torch.exp2(-seen[0].sum() / _HALF_LIFE)
        self.weight.mul_(decay).add_(seen[0])
        self.sums.mul_(decay).add_(seen[1:])

    def forward(self, log_sigma: Tensor) -> Tensor:
        """Mean errors at ln sigma [N]: float64 [N, K]; all 1 before the first sample."""
        sums, weight = self.sums.to(log_sigma.device), self.weight.to(log_sigma.device)
        places = torch.arange(len(weight), device=log_sigma.device)
        known = weight > 0.5 * weight.amax().clamp(max=1.0)
        distance = (places[:, None] - places).abs() + torch.where(known, 0, len(weight))
        nearest = distance.argmin(1)
        means = torch.where(known, sums / torch.where(known, weight, 1.0), 1.0)[:, nearest]
        bins = torch.bucketize(log_sigma.to(torch.float64), self.edges.to(log_sigma.device))
        return means[:, bins].T


class CompetingHeads(CombinationRule):
    """Competition: heads compete for every sample by their errors, and in use by their mean errors at the noise level.
    """

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.errors = RunningErrors(heads)

    def compared(self, errors: HeadErrors) -> Tensor:
        """Errors that are compared, [B, K]."""
        return errors.common

    def by_errors(self, errors: Tensor) -> Tensor:
        """Shares by errors [N, K]."""
        raise NotImplementedError

    def loss(self, errors: HeadErrors, log_sigma: Tensor) -> tuple[Tensor, Tensor]:
        compared = self.compared(errors)
        return _shared(compared, self.by_errors(compared.detach()))

    def shares(self, log_sigma: Tensor) -> Tensor:
        return self.by_errors(self.errors(log_sigma))

    def observe(self, errors: HeadErrors, log_sigma: Tensor) -> None:
        self.errors.observe(self.compared(errors), log_sigma)

    def update(self, skip: Tensor) -> None:
        self.errors.update(skip)


class Minimum(CompetingHeads):
    """Minimum: the head with the least error trains, and the one with the least mean error is used.

    raw: each head's own error, as published. With equally good heads the noise level alone decides then: x0's error is
    below that of the noise exactly where snr > 1, and v's always above both. Else errors of one prediction.
    """

    def __init__(self, heads: int, raw: bool) -> None:
        super().__init__(heads)
        self.of_one_error = not raw

    def compared(self, errors: HeadErrors) -> Tensor:
        return errors.common if self.of_one_error else errors.raw

    def by_errors(self, errors: Tensor) -> Tensor:
        return F.one_hot(errors.argmin(1), errors.shape[1]).to(errors.dtype)


class SoftMinimum(CompetingHeads):
    """Soft minimum: all heads train, with shares that fall as errors rise above the least: exp(-(e / e_min - 1) / T).

    Errors are of one prediction; T -> 0 is the minimum, T -> infinity the mean of all heads.
    """

    def __init__(self, heads: int, temperature: float = 0.1) -> None:
        """temperature: relative excess of a head's error over the least at which its share falls to 1 / e."""
        super().__init__(heads)
        self._temperature = temperature

    def by_errors(self, errors: Tensor) -> Tensor:
        least = errors.amin(1, keepdim=True).clamp_min(torch.finfo(errors.dtype).tiny)
        return torch.softmax(-(errors / least) / self._temperature, dim=1)


class Handover(CombinationRule):
    """Hand-over: one head for each range of the signal-to-noise ratio, in the order from noise to data."""

    log_sigma: Tensor

    def __init__(self, heads: int, snr: list[float]) -> None:
        """snr: where one head hands over to the next, rising, K - 1 numbers."""
        super().__init__()
        self._heads = heads
        # snr = sigma^-2
        self.register_buffer("log_sigma", -0.5 * torch.tensor(snr, dtype=torch.float64).log(), persistent=False)

    def loss(self, errors: HeadErrors, log_sigma: Tensor) -> tuple[Tensor, Tensor]:
        return _shared(errors.common, self.shares(log_sigma).to(errors.common.dtype))

    def shares(self, log_sigma: Tensor) -> Tensor:
        in_charge = (log_sigma.to(torch.float64)[:, None] <= self.log_sigma.to(log_sigma.device)).sum(1)  # [N]
        return F.one_hot(in_charge, self._heads).to(torch.float64)

    def least_conversion(self, conversion: Tensor, log_sigma: Tensor) -> Tensor:
        return (self.shares(log_sigma) * conversion).sum(1)


class InverseVariance(CombinationRule):
    """Inverse variance: all heads train, each on its error over its expected error; combined by inverse variance.

    The loss is the mean over heads of e_k / exp(u_k) + u_k, so that exp(u_k) becomes head k's mean squared error, and
    its share is proportional to 1 / the resulting error of x0. That is best for independent errors.
    """

    of_one_error = False

    def __init__(
        self, heads: int, features: int, log_sigma_range: tuple[float, float],
        conversion: Callable[[Tensor, str], Tensor],
    ) -> None:  # fmt: skip
        """conversion: as `PredictionHeads.conversion`."""
        super().__init__()
        self.uncertainty = LogUncertainty(heads, features, log_sigma_range)
        self._conversion = conversion

    def loss(self, errors: HeadErrors, log_sigma: Tensor) -> tuple[Tensor, Tensor]:
        u = self.uncertainty(log_sigma).T  # [B, K]
        return (errors.raw * torch.exp(-u) + u).mean(1), self.shares(log_sigma)

    @torch.no_grad()
    def shares(self, log_sigma: Tensor) -> Tensor:
        to_x0 = self._conversion(log_sigma, "x0").log()
        return torch.softmax(-(self.uncertainty(log_sigma).T + to_x0), dim=1)


@dataclass(kw_only=True)
class CombineConfig:
    """`[objective.combine]`: base of the rules; of_own_errors: heads train by their own errors, unweighted; no key."""

    name: str = setting("", "rule that selects the heads a sample trains, and combines them")

    of_own_errors = False

    def rule(self, count: int, uncertainty: Callable[[], CombinationRule]) -> CombinationRule:
        """Rule of `count` heads; uncertainty: makes the one that learns the expected errors."""
        raise NotImplementedError

    def problems(self, heads: list[str]) -> Iterator[tuple[str, str]]:
        """Problems of combining the heads: pairs of a key of this section and the reason."""
        yield from ()


@dataclass(kw_only=True)
class RawMinimumConfig(CombineConfig):
    """Least of the heads' own errors."""

    of_own_errors = True

    def rule(self, count: int, uncertainty: Callable[[], CombinationRule]) -> CombinationRule:
        return Minimum(count, raw=True)


@dataclass(kw_only=True)
class MinimumConfig(CombineConfig):
    """Least error, in the objective's prediction."""

    def rule(self, count: int, uncertainty: Callable[[], CombinationRule]) -> CombinationRule:
        return Minimum(count, raw=False)


@dataclass(kw_only=True)
class SoftMinimumConfig(CombineConfig):
    """Shares that fall with the error."""

    def rule(self, count: int, uncertainty: Callable[[], CombinationRule]) -> CombinationRule:
        return SoftMinimum(count)


@dataclass(kw_only=True)
class HandoverConfig(CombineConfig):
    """One head for each range of the signal-to-noise ratio."""

    snr: list[float] = setting(
        [], "signal-to-noise ratios, rising, of the hand-overs between `heads`, ordered from noise to data"
    )

    def rule(self, count: int, uncertainty: Callable[[], CombinationRule]) -> CombinationRule:
        return Handover(count, self.snr)

    def problems(self, heads: list[str]) -> Iterator[tuple[str, str]]:
        snr, wanted = self.snr, len(heads) - 1
        rising = all(low < high for low, high in itertools.pairwise(snr))
        if len(snr) != wanted or not rising or not all(0 < value < float("inf") for value in snr):
            yield "snr", (
                f"{snr} must be {wanted} rising, positive number{'s' if wanted > 1 else ''}: the signal-to-noise ratios"
                f" at which {', '.join(heads)}, from noise to data, hand over"
            )


@dataclass(kw_only=True)
class InverseVarianceConfig(CombineConfig):
    """All heads, each by its expected error."""

    of_own_errors = True

    def rule(self, count: int, uncertainty: Callable[[], CombinationRule]) -> CombinationRule:
        return uncertainty()


COMBINATIONS: dict[str, type[CombineConfig]] = {
    "raw_minimum": RawMinimumConfig,
    "minimum": MinimumConfig,
    "soft_minimum": SoftMinimumConfig,
    "snr_handover": HandoverConfig,
    "inverse_variance": InverseVarianceConfig,
}


class PredictionHeads(nn.Module):
    """Heads of one network, in the order of its output's channels; names: keys of PREDICTIONS, [K]."""

    def __init__(self, config: Any, path: Path, log_sigma_range: tuple[float, float]) -> None:
        """config: the `[objective]` section; log_sigma_range: where levels are trained."""
        super().__init__()
        self.names = tuple(config.heads)
        self._path, self._common, self._sigma_data = path, config.prediction, config.sigma_data
        count = len(self.names)
        uncertainty = partial(InverseVariance, count, config.uncertainty_features, log_sigma_range, self.conversion)
        self.rule: CombinationRule = config.combine.rule(count, uncertainty)

    def conversion(self, log_sigma: Tensor, prediction: str) -> Tensor:
        """(Squared error of `prediction`) / (that of head k) for one estimate at ln sigma [N], float64 [N, K]."""
        return self._factors(log_sigma, prediction).square()

    def least_conversion(self, log_sigma: Tensor) -> Tensor:
        """Least conversion at these levels, float64 [N], see `CombinationRule.least_conversion`."""
        if not self.rule.of_one_error:
            return torch.ones_like(log_sigma)
        return self.rule.least_conversion(self.conversion(log_sigma, self._common), log_sigma)

    def _factors(self, log_sigma: Tensor, prediction: str) -> Tensor:
        """Factors (error of `prediction`) / (error of head k), with their sign, float64 [N, K]."""
        sigma = torch.exp(log_sigma.to(torch.float64).clamp(*_LOG_SIGMA_RANGE))
        a, _ = self._path.coefficients(self._path.sigma_to_t(sigma))
        wanted, *given = (noise_error_factor(name, sigma, a, self._sigma_data) for name in (prediction, *self.names))
        return wanted[:, None] / torch.stack(given, dim=1)

    def errors(self, output: Tensor, x0: Tensor, noise: Tensor, t: Tensor) -> HeadErrors:
        """Errors of an output [B, K C, H, W] for clean images x0 and noise [B, C, H, W] at t [B]."""
        raw = torch.stack([part.square().flatten(1).mean(1) for part in self._residuals(output, x0, noise, t)], dim=1)
        return HeadErrors(raw, raw * self.conversion(torch.logit(t), self._common).to(raw.dtype))

    @torch.no_grad()
    def mixed_error(self, output: Tensor, x0: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        """Mean squared error [B] of the combined estimate of `objective.prediction`; arguments as in `errors`.

        Computed from the heads' errors, since x0 and noise do not determine a prediction at the ends of a path.
        """
        log_sigma = torch.logit(t.to(torch.float64))
        shares = self.rule.shares(log_sigma)
        factors = torch.where(shares > 0, shares * self._factors(log_sigma, self._common), 0.0).to(x0.dtype)
        residuals = enumerate(self._residuals(output, x0, noise, t))
        mix = sum((per_image(factors[:, k], x0) * part for k, part in residuals), start=torch.zeros(()))
        return mix.square().flatten(1).mean(1)

    def combine(self, output: Tensor, x_t: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """Combine the estimates to x0 and noise, of x_t's shape, by the shares at t [B]; a x0 + b noise = x_t."""
        a, b = self._path.coefficients(per_image(t, x_t))
        shares = self.rule.shares(torch.logit(t.to(torch.float64))).to(x_t.dtype)
        x0, noise = torch.zeros_like(x_t), torch.zeros_like(x_t)
        for k, (name, part) in enumerate(zip(self.names, self._split(output), strict=True)):
            share = per_image(shares[:, k], x_t)
            # A head without a share may have no finite estimate here.
            estimates = to_x0_and_noise(name, part, x_t, a, b, self._sigma_data)
            x0, noise = (
                total + torch.where(share > 0, share * estimate, 0.0)
                for total, estimate in zip((x0, noise), estimates, strict=True)
            )
        return x0, noise

    def observe(self, errors: HeadErrors, t: Tensor) -> None:
        """Observe a microbatch's errors at t [B], for rules that use earlier ones."""
        self.rule.observe(errors, torch.logit(t))

    def update(self, skip: Tensor) -> None:
        """Update after a whole global batch; skip: the optimizer leaves it out, bool scalar. Collective."""
        self.rule.update(skip)

    def _residuals(self, output: Tensor, x0: Tensor, noise: Tensor, t: Tensor) -> list[Tensor]:
        a, b = self._path.coefficients(per_image(t, x0))
        return [
            part - target(name, x0, noise, a, b, self._sigma_data)
            for name, part in zip(self.names, self._split(output), strict=True)
        ]

    def _split(self, output: Tensor) -> tuple[Tensor, ...]:
        return output.chunk(len(self.names), dim=1)


def head_problems(config: Any, path: Path) -> Iterator[tuple[str, str]]:
    """Problems of heads that cannot be trained together: pairs of a dotted key and the reason."""
    if not config.heads:
        return
    if unknown := [name for name in config.heads if name not in HEADS]:
        yield "objective.heads", f"{unknown[0]!r} is no prediction of a head (there are: {', '.join(HEADS)})"
        return
    if len(config.heads) < 2 or len(set(config.heads)) < len(config.heads):
        yield "objective.heads", f"{config.heads} must be two predictions or more, each once"
    if "noise" in config.heads and path.t_max == 1.0:
        yield "objective.heads", (
            f"the noise does not convert to x0 at t = 1, where objective.path = {config.path} starts to sample (leave it"
            " out)"
        )
    if config.preconditioning not in ("identity", "index"):
        yield "objective.heads", (
            f"objective.preconditioning = {config.preconditioning} is for one prediction (use identity, or index on a DDPM path)"
        )
    for key, text in config.combine.problems(config.heads):
        yield f"objective.combine.{key}", text
    if config.combine.of_own_errors and config.weighting.name != "none":
        yield "objective.weighting.name", (
            f"{config.weighting.name} is for errors of one prediction; objective.combine.name = {config.combine.name}"
            " trains each head by its own (use none)"
        )
    if config.combine.name == "inverse_variance" and config.learned_uncertainty:
        yield "objective.learned_uncertainty", "objective.combine.name = inverse_variance has its own (set it to false)"


def _shared(errors: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
    # Where a head has no share its error may be infinite.
    return torch.where(share > 0, share * errors, 0.0).sum(1), share
