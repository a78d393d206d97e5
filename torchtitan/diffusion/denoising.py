"""Denoising: path + prediction + preconditioning + weighting + timestep sampler.

    x_t = a x0 + b noise,   loss = importance x weight(sigma) x mean over pixels of (output - target)^2

With `heads` the network makes several predictions, and `torchtitan.diffusion.heads` combines their errors. An intermediate
head of the network is trained on the same target: loss + intermediate_share x (the same loss of its output).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan.diffusion.heads import (
    COMBINATIONS,
    CombineConfig,
    HeadErrors,
    InverseVariance,
    PredictionHeads,
    head_problems,
)
from torchtitan.diffusion.learned_variance import BOUND_WEIGHT, variational_bound
from torchtitan.diffusion.objective import Draw, LossTerms, Microbatch, Network, Objective, ObjectiveConfig
from torchtitan.diffusion.paths import PATHS, indexed, per_image
from torchtitan.diffusion.predictions import noise_error_weight, target, to_x0_and_noise
from torchtitan.diffusion.timesteps.registry import SamplerOf
from torchtitan.diffusion.uncertainty import LogUncertainty
from torchtitan.diffusion.weightings import WEIGHTINGS, WeightingConfig, prediction_weighting
from torchtitan.settings import Choice, choice, setting

_EDM_IN_USE = {"prediction or preconditioning or objective.weighting.name": ("edm",)}
_UNCERTAINTY_IN_USE = {"learned_uncertainty or objective.combine.name": (True, "inverse_variance")}
# Beyond these quantiles of the training density hardly any level is met.
_TAIL = 1e-3
# ln sigma far outside of what any density has in its middle.
_FAR = (12.0, 14.0)


@dataclass(kw_only=True)
class DenoisingConfig(ObjectiveConfig):
    """`[objective]` with name = "denoising": a weighted squared error of the prediction."""

    name: str = setting("denoising", "objective")
    sigma_data: float = setting(0.5, "standard deviation of the data, for EDM", gt=0, applies=_EDM_IN_USE)
    weighting: WeightingConfig = choice(Choice(WEIGHTINGS, "none"), "factor on the squared error by noise level")
    learned_uncertainty: bool = setting(
        False, "learn u, the ln of the loss at each noise level, and train on loss / e^u + u: EDM2's weighting"
    )
    uncertainty_features: int = setting(
        128, "number of random waves in ln(sigma) that form u", ge=1, le=65536, applies=_UNCERTAINTY_IN_USE
    )
    uncertainty_lr_scale: float = setting(
        100.0, "learning rate of u, as a multiple of the network's", ge=0, applies=_UNCERTAINTY_IN_USE
    )
    cosine_weight: float = setting(
        0.0, "weight of the mean over pixels of 1 - cos over channels of the predicted and the true velocity", ge=0
    )
    contrastive_weight: float = setting(
        0.0, "weight of the squared distance from the velocity of another sample of the microbatch, which is subtracted", ge=0,
        lt=1,
    )  # fmt: skip
    heads: list[str] = setting(
        [], "predictions of several heads of the network, as x0, noise and v; the error of `prediction` is then "
        "weighted and reported",
    )
    combine: CombineConfig = choice(
        Choice(COMBINATIONS, "inverse_variance"), "rule that combines the heads", applies={"heads": "set"}
    )
    intermediate_share: float | None = setting(
        None, "share of the loss of model.intermediate_head, added to that of the last layer; published are 0.5 and 1", ge=0
    )

    def heads_of_network(self) -> list[str]:
        return self.heads


class NoisyImages(NamedTuple):
    """Noisy images, and the network's inputs made of them.

    Attributes:
        x_t: noisy images [B, C, H, W].
        a, b: the path's coefficients, [B, 1, 1, 1].
        images, time: inputs of the network.
        c_skip, c_out: of its output, [B] each; None: 0 and 1.
    """

    x_t: Tensor
    a: Tensor
    b: Tensor
    images: Tensor
    time: Tensor
    c_skip: Tensor | None
    c_out: Tensor | None


class Denoising(Objective):
    """Denoising objective: a network predicts noise, clean images or a mix of them."""

    Config: ClassVar[type[ObjectiveConfig]] = DenoisingConfig
    learns_variance = True

    def __init__(self, config: DenoisingConfig, seed: int, sampler_of: SamplerOf | None = None) -> None:
        super().__init__(config, seed, sampler_of)
        self.weighting = prediction_weighting(config, self.path)
        ends = torch.tensor([_TAIL, 1.0 - _TAIL], dtype=torch.float64)
        trained = tuple(torch.logit(self.timestep_sampler.density.quantile(ends)).tolist())
        self.heads = PredictionHeads(config, self.path, trained) if config.heads else None
        self.uncertainty = None
        if config.learned_uncertainty:
            self.uncertainty = LogUncertainty(1, config.uncertainty_features, trained)
        self.flow_terms = None
        if config.cosine_weight or config.contrastive_weight:
            from torchtitan.diffusion.flow_terms import FlowTerms

            self.flow_terms, self.weighs_kept = FlowTerms(config), True
        self.intermediate_share = config.intermediate_share
        named = {"heads": self.heads, "uncertainty": self.uncertainty}
        self.learned = nn.ModuleDict({name: module for name, module in named.items() if module is not None})
        self.diagnostics = tuple(f"head_share/{name}" for name in config.heads)
        by_variance = self.heads is not None and isinstance(self.heads.rule, InverseVariance)
        self.learns_weights = self.uncertainty is not None or by_variance
        if self.heads is not None and self.tensors():
            self.reads_by_state = (
                f"objective.combine.name = {config.combine.name} combines the heads by shares learned in training (give"
                " the run's folder, or use snr_handover)"
            )

    @property
    def graphs(self) -> tuple[str, ...]:
        return (*super().graphs, "noisy", "terms")

    def loss(self, model: Network, batch: Microbatch, draw: Draw) -> LossTerms:
        noisy = self.noisy(batch.images, draw.noise, draw.t if draw.token_times is None else draw.token_times)
        output = model(noisy.images, noisy.time, batch.condition)
        loss, error, weighted, shares, head_errors = self.terms(batch.images, draw, noisy, output, batch.kept)
        diagnostics = {} if shares is None else dict(zip(self.diagnostics, shares.unbind(1), strict=True))
        return LossTerms(loss, error, draw.t, weighted, diagnostics, head_errors)

    def noisy(self, x0: Tensor, noise: Tensor, t: Tensor) -> NoisyImages:
        """Add noise to clean images at times t [B], or by token [B, 1, h, w], and make the network's inputs."""
        a, b = self.path.coefficients(per_image(t, x0))
        x_t = (a * x0).add_(b * noise)
        return NoisyImages(x_t, a, b, *self.network_inputs(x_t, t))

    def terms(
        self, x0: Tensor, draw: Draw, noisy: NoisyImages, output: Tensor, kept: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, HeadErrors | None]:
        """Terms of the loss of the network's output: loss, error and weighted of `LossTerms`, shares, errors of heads.

        The bound of a learned variance is in `loss` and `weighted`, the share of an intermediate head in `loss` alone, and so
        are the terms of the velocity, with `Microbatch.kept`. Of heads, error and weighted are those of their combination, and
        the shares those of `CombinationRule.loss`.
        """
        predicted, interpolation = self.read_output(output, noisy.x_t, noisy.c_skip, noisy.c_out)
        wanted = target(self.prediction, x0, draw.noise, noisy.a, noisy.b, self.sigma_data)
        shares = head_errors = None
        if self.heads is None:
            trained = _squared_error(predicted, wanted)
            error = trained.detach()
        else:
            head_errors = self.heads.errors(predicted, x0, draw.noise, draw.t)
            trained, shares = self.heads.rule.loss(head_errors, torch.logit(draw.t))
            error = self.heads.mixed_error(predicted.detach(), x0, draw.noise, draw.t)
        sigma = draw.t / (1.0 - draw.t).clamp_min(torch.finfo(torch.float32).tiny)
        weight = self.weighting(sigma)
        loss = weight * trained
        held_out = loss.detach() if self.heads is None else weight * error
        if self.uncertainty is not None:
            u = self.uncertainty(torch.logit(draw.t))[0]
            loss, weight = loss * torch.exp(-u) + u, weight * torch.exp(-u.detach())
        if self.intermediate_share is not None:
            early, _ = self.read_output(output[:, x0.shape[1] :], noisy.x_t, noisy.c_skip, noisy.c_out)
            loss = loss + self.intermediate_share * weight * _squared_error(early, wanted)
        if interpolation is not None:
            # The mean is trained by the weighted error alone.
            x0_estimate, _ = to_x0_and_noise(
                self.prediction, predicted.detach(), noisy.x_t, noisy.a, noisy.b, self.sigma_data
            )
            path = indexed(self.path)
            index = path.t_to_index(draw.t) if draw.path_index is None else draw.path_index
            bound = variational_bound(path, x0, noisy.x_t, x0_estimate, interpolation, index)
            bound = BOUND_WEIGHT * self.path.num_indices * bound
            loss, held_out = loss + bound, held_out + bound.detach()
        if self.flow_terms is not None and kept is not None:
            velocity = draw.noise - x0
            loss = loss + self.flow_terms.loss(predicted, noisy.x_t, noisy.a, noisy.b, velocity, weight, kept)
        return draw.importance * loss, error, draw.importance * held_out, shares, head_errors

    def introduction(self) -> str:
        weights = {"cosine": self.config.cosine_weight, "contrastive": self.config.contrastive_weight}
        terms = [f"{name} {weight:g}" for name, weight in weights.items() if weight]
        return f"terms of the velocity, in the training loss alone: {', '.join(terms)}" if terms else ""

    @torch.no_grad()
    def learned_weighting(self, sigma: Tensor) -> Tensor:
        """Learned weight on the squared error of the prediction at noise levels [N]; of sigma's dtype."""
        weight = self.weighting(sigma)
        if self.uncertainty is not None:
            weight = weight * torch.exp(-self.uncertainty(torch.log(sigma))[0]).to(weight.dtype)
        return weight

    def effective_weight(self, log_sigma: Tensor) -> Tensor | None:
        """Effective weight p(ln sigma) x weight at ln sigma [N], as of the noise's squared error.

        Two configurations with proportional effective weights are the same objective in expectation. For time warping
        and a learned uncertainty it is the initial one.

        Returns:
            density of the training noise levels x weight of the noise error at each, [N]; None where each head is
            trained by its own error.
        """
        if self.heads is not None and not self.heads.rule.of_one_error:
            return None
        sigma = torch.exp(log_sigma)
        a, _ = self.path.coefficients(torch.sigmoid(log_sigma))
        density = self.timestep_sampler.density.log_sigma_density(log_sigma)
        return density * self.learned_weighting(sigma) * noise_error_weight(self.prediction, sigma, a, self.sigma_data)

    @torch.no_grad()
    def log_uncertainties(self, log_sigma: Tensor) -> dict[str, float]:
        """Learned u at ln sigma [N], as `log_uncertainty/<n>`, or by head `log_uncertainty/<head>/<n>`."""
        found = {}
        if self.uncertainty is not None:
            found["log_uncertainty"] = self.uncertainty(log_sigma)[0]
        elif self.heads is not None and isinstance(self.heads.rule, InverseVariance):
            u = self.heads.rule.uncertainty(log_sigma)
            found = {f"log_uncertainty/{name}": of_head for name, of_head in zip(self.heads.names, u, strict=True)}
        return {f"{tag}/{n}": value for tag, values in found.items() for n, value in enumerate(values.tolist())}

    def lr_scales(self) -> dict[str, float]:
        """Learning rates of u, as multiples of the network's; what a subclass learns has the network's."""
        of_u = tuple(f"objective.{name}." for name in ("heads", "uncertainty"))
        return {name: self.config.uncertainty_lr_scale for name in self.parameters() if name.startswith(of_u)}

    @classmethod
    def problems(cls, config: DenoisingConfig) -> Iterator[tuple[str, str]]:
        """Find heads that cannot be trained together, and samplers that would learn from losses made alike."""
        yield from head_problems(config, PATHS[config.path]())
        for key in ("cosine_weight", "contrastive_weight"):
            if not getattr(config, key):
                continue
            if config.heads:
                yield f"objective.{key}", "is for a network of one prediction, without objective.heads (leave it out)"
            if config.learned_uncertainty:
                yield f"objective.{key}", "is no part of the loss that objective.learned_uncertainty measures (set that to false)"
        if config.contrastive_weight and config.timesteps.learns:
            text = "learns from losses, which objective.contrastive_weight makes negative (use a density)"
            yield "objective.timesteps.name", f"{config.timesteps.name} {text}"
        if not config.timesteps.learns:
            return
        text = f"{config.timesteps.name} learns from losses, which %s makes alike at all timesteps (use a density, or %s)"
        if config.learned_uncertainty:
            yield "objective.timesteps.name", text % ("objective.learned_uncertainty", "set that to false")
        elif config.heads and config.combine.name == "inverse_variance":
            yield "objective.timesteps.name", text % ("objective.combine.name = inverse_variance", "another name")

    def problems_of_parts(self) -> Iterator[tuple[str, str]]:
        """Find a density whose tail makes the mean loss infinite."""
        config, timesteps = self.config, self.config.timesteps
        # Others' tails fall as powers of sigma.
        if timesteps.light_tailed or self.path.num_indices:
            return
        if end := self._end_without_mean():
            yield "objective.timesteps.name", (
                f"{timesteps.name} draws so many timesteps near {end} that objective.weighting.name ="
                f" {config.weighting.name} on objective.prediction = {config.prediction} has an infinite mean loss"
                " (use logit_normal, or another objective.weighting.name)"
            )

    def _end_without_mean(self) -> str:
        """End of the path at which density x weight x squared error does not fall, or "".

        The error is the larger of the unavoidable one, 1 / (1 + sigma^2) in the noise of unit Gaussian data, and an error
        of 1 in the network's own output; of several heads, in that of the one with the least weight.
        """
        for end, sign in (("clean data", -1.0), ("noise", 1.0)):
            log_sigma = sign * torch.tensor(_FAR, dtype=torch.float64)
            sigma, t = torch.exp(log_sigma), torch.sigmoid(log_sigma)
            a, _ = self.path.coefficients(t)
            unavoidable = noise_error_weight(self.prediction, sigma, a, self.sigma_data) / (1.0 + sigma**2)
            own = self.preconditioning.scaling(t).c_out ** 2
            if self.heads is not None:
                own = self.heads.least_conversion(log_sigma)
            error = torch.maximum(unavoidable, own)
            density = self.timestep_sampler.density.log_sigma_density(log_sigma)
            middle, far = (density * self.weighting(sigma) * error).tolist()
            if far > 0.999 * middle:
                return end
        return ""


def _squared_error(output: Tensor, wanted: Tensor) -> Tensor:
    # Divided as [B]: the backward of a mean would divide whole images.
    return F.mse_loss(output, wanted, reduction="none").flatten(1).sum(1) / wanted[0].numel()
