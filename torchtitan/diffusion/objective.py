"""The training objective: path + prediction + preconditioning + weighting + timestep sampler.

    x_t = a x0 + b noise,   loss = importance x weight(sigma) x mean over pixels of (output - target)^2

With `heads` the network makes several predictions, and `torchtitan.diffusion.heads` combines their errors.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from torchtitan import philox
from torchtitan.conditions import Condition
from torchtitan.diffusion.heads import COMBINATIONS, CombineConfig, HeadErrors, InverseVariance, PredictionHeads
from torchtitan.diffusion.learned_variance import BOUND_WEIGHT, variational_bound
from torchtitan.diffusion.paths import PATHS, indexed, per_image
from torchtitan.diffusion.preconditioning import PRECONDITIONINGS
from torchtitan.diffusion.predictions import PREDICTIONS, noise_error_weight, target, to_x0_and_noise
from torchtitan.diffusion.timesteps.registry import TIMESTEPS, SamplerOf, build_sampler
from torchtitan.diffusion.timesteps.sampler import GlobalBatch, TimestepsConfig
from torchtitan.diffusion.uncertainty import LogUncertainty
from torchtitan.diffusion.weightings import WEIGHTINGS, WeightingConfig, prediction_weight
from torchtitan.settings import Choice, OneOf, choice, setting

# A diffusion network: (x [B, C, H, W], time [B], condition) -> [B, C, H, W]
Network = Callable[[Tensor, Tensor, Condition], Tensor]


_EDM_IN_USE = {"prediction or preconditioning or objective.weighting.name": ("edm",)}
_UNCERTAINTY_IN_USE = {"learned_uncertainty or objective.combine.name": (True, "inverse_variance")}
# Beyond these quantiles of the training density hardly any level is met.
_TAIL = 1e-3


@dataclass(kw_only=True)
class ObjectiveConfig:
    """`[objective]`: the network's target, the training noise levels, and the weighting of errors."""

    path: OneOf[str, PATHS] = setting("rectified_flow", "how data turns into noise: x_t = a(t) x0 + b(t) noise")
    prediction: OneOf[str, PREDICTIONS] = setting(
        "velocity", "target of the network's output; edm: F of EDM's preconditioning"
    )
    preconditioning: OneOf[str, PRECONDITIONINGS] = setting(
        "identity", "scaling of the network's input, output and time; index: the DDPM's index is the time; sit: as SiT"
    )
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
    heads: list[str] = setting(
        [], "predictions of several heads of the network, as x0, noise and v; the error of `prediction` is then "
        "weighted and reported",
    )
    combine: CombineConfig = choice(
        Choice(COMBINATIONS, "inverse_variance"), "rule that combines the heads", applies={"heads": "set"}
    )
    timesteps: TimestepsConfig = choice(Choice(TIMESTEPS, "logit_normal"), "density or sampler of the timesteps")
    shift: float = setting(
        1.0, "factor on sigma at every timestep drawn: above 1 towards noise, for larger images", ge=0.01, le=100
    )
    t_min: float = setting(0.0, "smallest timestep trained, in the common time t = sigma / (1 + sigma)", ge=0, lt=1)
    t_max: float = setting(1.0, "largest timestep trained; indices of other times are left out", gt=0, le=1)
    spread: Literal["none", "stratified", "low_discrepancy"] = setting(
        "none", "spread of a global batch's timesteps over the density: independent, one per interval, equally spaced"
    )


@dataclass(frozen=True)
class Draw:
    """Draw of everything random about one microbatch of training.

    Attributes:
        t: timesteps [B] in [0, 1].
        noise: standard normal, float32, of the images' shape.
        importance: objective's density / sampling density at t, [B].
        index: the DDPM index that t stands for, int64 [B]; None where the path has no integer indices.
    """

    t: Tensor
    noise: Tensor
    importance: Tensor
    index: Tensor | None = None


@dataclass(frozen=True)
class LossTerms:
    """Loss terms of one microbatch, each float32 [B].

    Attributes:
        loss: what is minimised, with the bound of a learned variance; its mean over the global batch is the
            training loss.
        error: the plain mean squared error of the prediction, for loss by timestep; no gradient. Of heads, that of
            their combination.
        t: the timesteps.
        weighted: importance x (weight x error + the bound), never negative: the loss itself, except that it is the
            combination's for heads, and excludes a learned uncertainty; no gradient.
        shares: of each head, [B, K], as `CombinationRule.loss` has it; None without heads.
        head_errors: for the memory of their rule; None without heads.
    """

    loss: Tensor
    error: Tensor
    t: Tensor
    weighted: Tensor
    shares: Tensor | None = None
    head_errors: HeadErrors | None = None


class Objective:
    """Objective of a diffusion training, and estimates from the trained network.

    Attributes:
        heads: of a network with several predictions, else None.
        uncertainty: the learned ln of the loss, where `learned_uncertainty` is set, else None.
        learned: the objective's own trained or measured state, which belongs into a checkpoint.
    """

    def __init__(self, config: ObjectiveConfig, seed: int, sampler_of: SamplerOf | None = None) -> None:
        """sampler_of: draws timesteps from the configured density, instead of what the configuration says."""
        self.path = PATHS[config.path]()
        self.prediction = config.prediction
        self.sigma_data = config.sigma_data
        self.preconditioning = PRECONDITIONINGS[config.preconditioning](self.path, self.prediction, self.sigma_data)
        self.weighting = partial(prediction_weight, config, self.path)
        self.timestep_sampler = build_sampler(config, self.path, seed, sampler_of)
        ends = torch.tensor([_TAIL, 1.0 - _TAIL], dtype=torch.float64)
        trained = tuple(torch.logit(self.timestep_sampler.density.quantile(ends)).tolist())
        self.heads = PredictionHeads(config, self.path, trained) if config.heads else None
        self.uncertainty = None
        if config.learned_uncertainty:
            self.uncertainty = LogUncertainty(1, config.uncertainty_features, trained)
        named = {"heads": self.heads, "uncertainty": self.uncertainty}
        self.learned = nn.ModuleDict({name: module for name, module in named.items() if module is not None})
        self.seed = seed

    def to(self, device: torch.device) -> "Objective":
        """Move the objective's learned state to a device; returns the objective itself."""
        self.learned.to(device)
        return self

    def draw(self, shape: tuple[int, ...], batch: GlobalBatch, indices: Tensor) -> Draw:
        """Draw timesteps and noise for the samples `indices` [B] of a global batch; `shape` is one image's."""
        t, importance = self.timestep_sampler.sample(batch, indices)
        index = indexed(self.path).t_to_index(t) if self.path.discrete else None
        return Draw(t, philox.normal(self.seed, "noise", indices, shape, batch.attempt), importance, index)

    def loss(self, model: Network, x0: Tensor, condition: Condition, draw: Draw) -> LossTerms:
        """Per-sample training loss of a network.

        Args:
            model: the network.
            x0: clean images, float32 [B, C, H, W].
            condition: of each image, the null condition where it is dropped, or None.
            draw: timesteps and noise.
        """
        a, b = (per_image(c, x0) for c in self.path.coefficients(draw.t))
        x_t = a * x0 + b * draw.noise
        output, interpolation = self._output(model, x_t, draw.t, condition)
        wanted = target(self.prediction, x0, draw.noise, a, b, self.sigma_data)
        shares = head_errors = None
        if self.heads is None:
            trained = (output - wanted).square().flatten(1).mean(1)  # [B]
            error = trained.detach()
        else:
            head_errors = self.heads.errors(output, x0, draw.noise, draw.t)
            trained, shares = self.heads.rule.loss(head_errors, torch.logit(draw.t))
            error = self.heads.mixed_error(output.detach(), x0, draw.noise, draw.t)
        sigma = draw.t / (1.0 - draw.t).clamp_min(torch.finfo(torch.float32).tiny)
        weight = self.weighting(sigma)
        loss = weight * trained
        held_out = weight * error
        if self.uncertainty is not None:
            u = self.uncertainty(torch.logit(draw.t))[0]
            loss = loss * torch.exp(-u) + u
        if interpolation is not None:
            # The mean is trained by the weighted error alone.
            x0_estimate, _ = to_x0_and_noise(self.prediction, output.detach(), x_t, a, b, self.sigma_data)
            path = indexed(self.path)
            index = path.t_to_index(draw.t)
            bound = variational_bound(path, x0, x_t, x0_estimate, interpolation, index)
            bound = BOUND_WEIGHT * self.path.num_indices * bound
            loss, held_out = loss + bound, held_out + bound.detach()
        importance = draw.importance
        return LossTerms(importance * loss, error, draw.t, importance * held_out, shares, head_errors)

    def predict(self, model: Network, x_t: Tensor, t: Tensor, condition: Condition) -> tuple[Tensor, Tensor]:
        """Estimate the clean image and the noise at times t [B] in noisy images x_t [B, C, H, W]; float32."""
        x0, noise, _ = self.predict_with_variance(model, x_t, t, condition)
        return x0, noise

    def predict_with_variance(
        self, model: Network, x_t: Tensor, t: Tensor, condition: Condition
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Estimate the clean image, the noise, and the place of the reverse step's variance between its limits.

        Args:
            model: the network.
            x_t: noisy images [B, C, H, W].
            t: their times [B].
            condition: of each image, or None.

        Returns:
            x0, noise and the fraction of the way from the ln of the smallest variance (0) to that of the largest (1),
            float32 of x_t's shape; no fraction (None) from a network that learns none.
        """
        a, b = (per_image(c, x_t) for c in self.path.coefficients(t))
        output, interpolation = self._output(model, x_t, t, condition)
        if self.heads is not None:
            return *self.heads.combine(output, x_t, t), None
        x0, noise = to_x0_and_noise(self.prediction, output, x_t, a, b, self.sigma_data)
        return x0, noise, None if interpolation is None else 0.5 * (interpolation + 1.0)

    @torch.no_grad()
    def learned_weighting(self, sigma: Tensor) -> Tensor:
        """Learned weight on the squared error of the prediction at noise levels [N]; of sigma's dtype."""
        weight = self.weighting(sigma)
        if self.uncertainty is not None:
            weight = weight * torch.exp(-self.uncertainty(torch.log(sigma))[0]).to(weight.dtype)
        return weight

    def effective_weight(self, log_sigma: Tensor) -> Tensor | None:
        """Effective weight p(ln sigma) x weight, in the parametrisation of the noise's squared error.

        Two configurations with proportional effective weights are the same objective in expectation. For time warping
        and a learned uncertainty it is the initial one.

        Args:
            log_sigma: values of ln sigma [N].

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

    def observe(self, batch: GlobalBatch, indices: Tensor, terms: LossTerms) -> None:
        """Observe a microbatch's losses, for samplers and heads that learn; indices [B] as given to `draw`."""
        self.timestep_sampler.observe(batch, indices, terms.t, terms.loss)
        if self.heads is not None and terms.head_errors is not None:
            self.heads.observe(terms.head_errors, terms.t)

    def update(self, skip: Tensor) -> None:
        """Update after the backward of a whole global batch: learn from the observed losses, unless `skip`; collective.
        """
        self.timestep_sampler.update(skip)
        if self.heads is not None:
            self.heads.update(skip)

    @property
    def learns_weights(self) -> bool:
        """True if losses are divided by a learned expectation, which makes them alike at all timesteps."""
        return self.uncertainty is not None or (self.heads is not None and isinstance(self.heads.rule, InverseVariance))

    @property
    def mixes_by_state(self) -> bool:
        """True if `predict` depends on state learned in training."""
        return self.heads is not None and bool(self.tensors())

    @torch.no_grad()
    def log_uncertainties(self, log_sigma: Tensor) -> dict[str, float]:
        """Log uncertainties: learned u at ln sigma [N], as `log_uncertainty/<n>`, or by head
        `log_uncertainty/<head>/<n>`.
        """
        found = {}
        if self.uncertainty is not None:
            found["log_uncertainty"] = self.uncertainty(log_sigma)[0]
        elif self.heads is not None and isinstance(self.heads.rule, InverseVariance):
            u = self.heads.rule.uncertainty(log_sigma)
            found = {f"log_uncertainty/{name}": of_head for name, of_head in zip(self.heads.names, u, strict=True)}
        return {f"{tag}/{n}": value for tag, values in found.items() for n, value in enumerate(values.tolist())}

    def parameters(self) -> dict[str, nn.Parameter]:
        """Parameters of the objective itself, by name; whole on every rank."""
        return {f"objective.{name}": parameter for name, parameter in self.learned.named_parameters()}

    def tensors(self) -> dict[str, Tensor]:
        """Tensors of `learned` for a checkpoint, by name; the tensors themselves."""
        return {name: tensor.detach() for name, tensor in self.learned.state_dict(keep_vars=True).items()}

    def _output(
        self, model: Network, x_t: Tensor, t: Tensor, condition: Condition
    ) -> tuple[Tensor, Tensor | None]:
        """Output of the network: the prediction, and the interpolation of variances if it has twice x_t's channels."""
        scaling = self.preconditioning.scaling(t)
        output = model(per_image(scaling.c_in, x_t) * x_t, scaling.c_noise, condition).to(torch.float32)
        interpolation = None
        count = 1 if self.heads is None else len(self.heads.names)
        if self.heads is None and self.path.discrete and output.shape[1] == 2 * x_t.shape[1]:
            output, interpolation = output.chunk(2, dim=1)
        if output.shape != (len(x_t), count * x_t.shape[1], *x_t.shape[2:]):  # it might broadcast
            raise ValueError(f"the model's output is {list(output.shape)}, the target {count} times {list(x_t.shape)}")
        if self.heads is not None:
            return output, None
        return per_image(scaling.c_skip, x_t) * x_t + per_image(scaling.c_out, x_t) * output, interpolation
