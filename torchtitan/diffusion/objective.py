"""The training objective: path + prediction + preconditioning + weighting + timestep sampler.

    x_t = a x0 + b noise,   loss = importance x weight(sigma) x mean over pixels of (output - target)^2
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from torchtitan.diffusion import philox
from torchtitan.diffusion.paths import PATHS, per_image
from torchtitan.diffusion.preconditioning import PRECONDITIONINGS
from torchtitan.diffusion.predictions import noise_error_weight, target, to_x0_and_noise
from torchtitan.diffusion.timesteps import GlobalBatch, LogitNormal, TimestepSampler, Uniform
from torchtitan.diffusion.weightings import WEIGHTINGS
from torchtitan.settings import setting

# A diffusion network: (x [B, C, H, W], time [B], class [B] or None) -> [B, C, H, W]
Network = Callable[[Tensor, Tensor, Tensor | None], Tensor]


@dataclass(kw_only=True)
class ObjectiveConfig:
    """`[objective]`: what the model is trained to predict, at which noise levels, and how errors are weighted."""

    path: Literal["rectified_flow"] = setting("rectified_flow", "how data turns into noise: x_t = a(t) x0 + b(t) noise")
    prediction: Literal["velocity"] = setting("velocity", "what the network's output stands for")
    preconditioning: Literal["identity"] = setting("identity", "scaling of the network's input, output and time")
    weighting: Literal["none"] = setting("none", "factor on the squared error as a function of the noise level")
    timestep_sampler: Literal["uniform", "logit_normal"] = setting("logit_normal", "density of the training timesteps")
    logit_mean: float = setting(0.0, "mean of logit(t)", applies={"timestep_sampler": ("logit_normal",)})
    logit_std: float = setting(
        1.0, "standard deviation of logit(t)", gt=0, applies={"timestep_sampler": ("logit_normal",)}
    )
    stratified: bool = setting(False, "spread the timesteps of a global batch evenly over the density's quantiles")


@dataclass(frozen=True)
class Draw:
    """Everything random about one microbatch of training.

    Attributes:
        t: timesteps [B] in [0, 1].
        noise: standard normal, float32, of the images' shape.
        importance: objective's density / sampling density at t, [B].
    """

    t: Tensor
    noise: Tensor
    importance: Tensor


@dataclass(frozen=True)
class LossTerms:
    """The outcome of one microbatch, each float32 [B].

    Attributes:
        loss: what is minimised; the training loss is its mean over the global batch.
        error: the plain mean squared error of the prediction, for loss by timestep; no gradient.
        t: the timesteps.
    """

    loss: Tensor
    error: Tensor
    t: Tensor


class Objective:
    """A diffusion training objective and the reading of the trained network."""

    def __init__(self, config: ObjectiveConfig, seed: int) -> None:
        self.path = PATHS[config.path]()
        self.prediction = config.prediction
        self.preconditioning = PRECONDITIONINGS[config.preconditioning]()
        self.weighting = WEIGHTINGS[config.weighting]
        density = (
            LogitNormal(config.logit_mean, config.logit_std)
            if config.timestep_sampler == "logit_normal"
            else Uniform()
        )
        self.timestep_sampler = TimestepSampler(density, seed, config.stratified)
        self.seed = seed

    def draw(self, shape: tuple[int, ...], batch: GlobalBatch, indices: Tensor) -> Draw:
        """Draw timesteps and noise for the samples `indices` [B] of a global batch; `shape` is one image's."""
        t, importance = self.timestep_sampler.sample(batch, indices)
        return Draw(t, philox.normal(self.seed, "noise", indices, shape, batch.attempt), importance)

    def loss(self, model: Network, x0: Tensor, condition: Tensor | None, draw: Draw) -> LossTerms:
        """Per-sample training loss of a network.

        Args:
            model: the network.
            x0: clean images, float32 [B, C, H, W].
            condition: class per image [B], null class where the label is dropped, or None.
            draw: timesteps and noise.
        """
        a, b = (per_image(c, x0) for c in self.path.coefficients(draw.t))
        x_t = a * x0 + b * draw.noise
        output = self._output(model, x_t, draw.t, condition)
        wanted = target(self.prediction, x0, draw.noise, a, b)
        if output.shape != wanted.shape:  # it might broadcast
            raise ValueError(f"the model's output is {list(output.shape)}, the target {list(wanted.shape)}")
        error = (output - wanted).square().flatten(1).mean(1)  # [B]
        sigma = draw.t / (1.0 - draw.t).clamp_min(torch.finfo(torch.float32).tiny)
        return LossTerms(draw.importance * self.weighting(sigma) * error, error.detach(), draw.t)

    def predict(self, model: Network, x_t: Tensor, t: Tensor, condition: Tensor | None) -> tuple[Tensor, Tensor]:
        """Estimate the clean image and the noise at times t [B] in noisy images x_t [B, C, H, W]; float32."""
        a, b = (per_image(c, x_t) for c in self.path.coefficients(t))
        return to_x0_and_noise(self.prediction, self._output(model, x_t, t, condition), x_t, a, b)

    def effective_weight(self, log_sigma: Tensor) -> Tensor:
        """p(ln sigma) x weight, in the currency of the noise's squared error.

        Two configurations with proportional effective weights are the same objective in expectation.

        Args:
            log_sigma: values of ln sigma [N].

        Returns:
            density of the training noise levels x weight of the noise error at each, [N].
        """
        sigma = torch.exp(log_sigma)
        a, _ = self.path.coefficients(torch.sigmoid(log_sigma))
        density = self.timestep_sampler.density.log_sigma_density(log_sigma)
        return density * self.weighting(sigma) * noise_error_weight(self.prediction, sigma, a)

    def _output(self, model: Network, x_t: Tensor, t: Tensor, condition: Tensor | None) -> Tensor:
        scaling = self.preconditioning.scaling(t)
        output = model(per_image(scaling.c_in, x_t) * x_t, scaling.c_noise, condition).to(torch.float32)
        return per_image(scaling.c_skip, x_t) * x_t + per_image(scaling.c_out, x_t) * output
