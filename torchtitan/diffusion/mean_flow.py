"""Mean flows: the mean velocity u(z, r, t) over the times r to t, by which a sample takes one step, x = e - u(e, 0, 1).

    u(z_t, r, t) = v - (t - r) du/dt,   du/dt = tangent du/dz + du/dt at fixed z,   z_t = (1 - t) x + t e,   v = e - x

    loss = importance x d / (stop_gradient d + c / D)^p,   d = mean over D elements of (u + (t - r) stop_gradient du/dt - v)^2

The source's d is a sum, which changes the loss by D^(1 - p). Where r = t it is flow matching. The tangent is one of

    sampled    v. Source: Geng et al., "Mean flows for one-step generative modeling", arXiv 2505.13447, eqs. 6, 8 and 22
    predicted  u(z, t, t), so that the loss is a regression to v alone. Source: Geng et al., "Improved mean flows: on the
               challenges of fastforward generative models", arXiv 2512.02012, section 4; without its second head

du/dt is a difference quotient of two calls without gradient, which every layout, compiler and attention kernel has, where
forward derivatives lack most. Its ends stay within r and 1: in the middle they are t - step and t + step, and the error is
O(step^2); near r it is multiplied by t - r, which is no larger than step there; above 1 - step it is O(step).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor

from torchtitan import philox
from torchtitan.conditions import Condition
from torchtitan.diffusion.objective import Draw, LossTerms, Microbatch, Network, Objective, ObjectiveConfig
from torchtitan.diffusion.paths import per_image
from torchtitan.diffusion.predictions import PRECONDITIONINGS
from torchtitan.diffusion.timesteps.placement import LargerOfTwo
from torchtitan.diffusion.timesteps.registry import SAMPLERS, SamplerOf
from torchtitan.diffusion.timesteps.sampler import GlobalBatch
from torchtitan.settings import OneOf, setting

# c of the weight, as published with either tangent.
_FLOOR = {"sampled": 1e-3, "predicted": 1e-2}
_FINEST_STEP = 0.002  # of float32: on a network of digits 4e-4 off the derivative, and 2e-3 with 0.005


@dataclass(kw_only=True)
class MeanFlowConfig(ObjectiveConfig):
    """`[objective]` with name = "mean_flow"."""

    name: str = setting("mean_flow", "objective")
    preconditioning: OneOf[str, PRECONDITIONINGS] = setting(
        "data_time", "scaling of the network's input, output and time; data_time: 1 - t"
    )
    tangent: Literal["predicted", "sampled"] = setting(
        "predicted", "direction of du/dt: the network's velocity at t, as improved mean flows, or the sample's, as mean flows"
    )
    equal_share: float = setting(0.5, "share of samples at two equal times, which are flow matching", ge=0, le=1)
    weight_power: float = setting(1.0, "power p of the weight 1 / (squared error + c)^p on a sample's loss; 0: none", ge=0, le=2)
    difference_step: float | None = setting(
        None, "step in t of the difference quotient du/dt; default: 0.002, 0.02 with TF32, 0.05 with bfloat16", ge=1e-4, le=0.2
    )

    two_times = True

    def sampling_defaults(self) -> dict[str, Any]:
        return {"solver.name": "mean_flow", "num_steps": 1, "guidance_scale": 1.0}

    def resolved(self, finest_step: float) -> ObjectiveConfig:
        return replace(self, difference_step=finest_step) if self.difference_step is None else self


class MeanFlow(Objective):
    """Mean flow: a network of a time and a duration, with the mean velocity over the duration before the time."""

    Config: ClassVar[type[ObjectiveConfig]] = MeanFlowConfig

    def __init__(self, config: MeanFlowConfig, seed: int, sampler_of: SamplerOf | None = None) -> None:
        super().__init__(config, seed, sampler_of)
        self.step = _FINEST_STEP if config.difference_step is None else config.difference_step
        self.untrained_forwards = 3 if config.tangent == "predicted" else 2

    def draw(self, shape: tuple[int, ...], batch: GlobalBatch, indices: Tensor) -> Draw:
        return self.with_duration(super().draw(shape, batch, indices), self.seed, "duration", indices, batch.attempt)

    def with_duration(self, draw: Draw, seed: int, purpose: str, numbers: Tensor, attempt: int = 0) -> Draw:
        u, share = philox.uniform(seed, purpose, numbers, attempt), self.config.equal_share
        if share == 1.0:
            return draw
        density = cast(LargerOfTwo, self.timestep_sampler.density)
        earlier = density.smaller(draw.t, (u - share).clamp_min(0.0) / (1.0 - share))
        return draw._replace(duration=torch.where(u < share, 0.0, draw.t - earlier).to(torch.float32))

    def loss(self, model: Network, batch: Microbatch, draw: Draw) -> LossTerms:
        x0, t, condition = batch.images, draw.t, batch.condition
        duration = torch.zeros_like(t) if draw.duration is None else draw.duration
        a, b = self.path.coefficients(per_image(t, x0))
        x_t, velocity = a * x0 + b * draw.noise, draw.noise - x0
        slope = self.slope(model, x_t, velocity, t, duration, condition)
        mean_velocity = self.mean_velocity(model, x_t, t, duration, condition)
        residual = mean_velocity + per_image(duration, x0) * slope - velocity
        error = residual.square().flatten(1).mean(1)  # [B]
        held_out = error.detach()
        weight = draw.importance
        if self.config.weight_power:
            floor = _FLOOR[self.config.tangent] / x0[0].numel()
            weight = weight / (held_out + floor) ** self.config.weight_power
        return LossTerms(weight * error, held_out, t, draw.importance * held_out)

    def mean_velocity(self, model: Network, x: Tensor, t: Tensor, duration: Tensor, condition: Condition) -> Tensor:
        """Mean velocity u(x, t - duration, t) of images x [B, C, H, W], float32 at least; times and durations [B]."""
        output = cast(Any, model)(x, self.preconditioning.time(t), condition, duration)
        return output.to(torch.promote_types(output.dtype, torch.float32))

    @torch.no_grad()
    def slope(
        self, model: Network, x_t: Tensor, velocity: Tensor, t: Tensor, duration: Tensor, condition: Condition
    ) -> Tensor:
        """Difference quotient du/dt along the tangent at times t [B], x_t's shape; velocity: of the samples."""
        if self.config.tangent == "predicted":
            velocity = self.mean_velocity(model, x_t, t, torch.zeros_like(t), condition)
        earlier = t - duration
        low, high = torch.maximum(t - self.step, earlier), (t + self.step).clamp_max(1.0)
        ends = [
            self.mean_velocity(model, x_t + per_image(end - t, x_t) * velocity, end, end - earlier, condition)
            for end in (low, high)
        ]
        # Of no width only where both times are 1, and the quotient has no weight.
        width = (high - low).clamp_min(torch.finfo(t.dtype).eps)
        return (ends[1] - ends[0]) / per_image(width, x_t)

    def introduction(self) -> str:
        calls = self.untrained_forwards
        return (
            f"mean flow: du/dt over steps of {self.step:g} in t; {calls} calls of the network without gradient make a step"
            f" {(3 + calls) / 3:.2f} times the FLOPs of denoising"
        )

    @classmethod
    def problems(cls, config: MeanFlowConfig) -> Iterator[tuple[str, str]]:
        """Refuse what has no mean velocity of two drawn times, and times that turn too fast for a difference quotient."""
        wanted = {"path": "rectified_flow", "prediction": "velocity", "preconditioning": "data_time"}
        for key, value in wanted.items():
            if (given := getattr(config, key)) != value:
                because = "turns too fast in t for a difference quotient" if key == "preconditioning" else "has no mean velocity"
                yield f"objective.{key}", f"{given} {because}, the target of objective.name = mean_flow (use {value})"
        if config.timesteps.name in SAMPLERS:
            text = f"{config.timesteps.name} draws one time, and objective.name = mean_flow two (use a density, as logit_normal)"
            yield "objective.timesteps.name", text
