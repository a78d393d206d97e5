"""Mean flows: the mean velocity u(z, r, t) over the times r to t, by which a sample takes one step, x = e - u(e, 0, 1).

    u(z_t, r, t) = v - (t - r) du/dt,   du/dt = tangent du/dz + du/dt at fixed z,   z_t = (1 - t) x + t e,   v = e - x

    loss = importance x d / (stop_gradient d + c / D)^p,   d = mean over D elements of (u + (t - r) stop_gradient du/dt - v)^2

The source's d is a sum, which changes the loss by D^(1 - p). Where r = t it is flow matching. The tangent is one of

    sampled    v. Source: Geng et al., "Mean flows for one-step generative modeling", arXiv 2505.13447, eqs. 6, 8 and 22
    predicted  u(z, t, t), so that the loss is a regression to v alone. Source: Geng et al., "Improved mean flows: on the
               challenges of fastforward generative models", arXiv 2512.02012, section 4
    head       the velocity at t as the network's intermediate head predicts it, trained with a loss d of the same form. In the
               source the second head has blocks too

With guidance as an input the network has, besides times, a scale w and the times (low, high) of guidance, and v becomes

    v + (1 - 1 / w) (u_w(z, t, t) - u_null(z, t, t)),   of which v_null + w (v_class - v_null) is the fixed point

with w = 1 outside (low, high) and for the null class. The tangent is u_w(z, t, t), or that target. ln w is uniform up to
ln guidance_max, low in [0, 0.5], high in [0.5, 1]; guidance is at all times where r = t. Source: arXiv 2512.02012, section 4;
its code gives the null class scales too, and calls the network a third time for the target.

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
from torchtitan.conditions import Condition, Entries
from torchtitan.diffusion.objective import Draw, LossTerms, Microbatch, Network, Objective, ObjectiveConfig
from torchtitan.diffusion.paths import per_image
from torchtitan.diffusion.predictions import PRECONDITIONINGS
from torchtitan.diffusion.timesteps.placement import LargerOfTwo
from torchtitan.diffusion.timesteps.registry import SAMPLERS, SamplerOf
from torchtitan.diffusion.timesteps.sampler import GlobalBatch
from torchtitan.settings import OneOf, setting

# c of the weight, as published with either tangent.
_FLOOR = {"sampled": 1e-3, "predicted": 1e-2, "head": 1e-2}
_FINEST_STEP = 0.002  # of float32; 0.005 is 0.2 to 0.4 % off the derivative
# Error of the quotient on digits (benchmarks/mean_flow_slope.py), by the step that follows from the precision.
_ERRORS = {
    0.002: "less than 0.1 % off the derivative, on digits", 0.01: "2 to 3 % off the derivative, on digits",
    0.05: "13 to 16 % off the derivative, on digits; less than 0.1 % with whole weights or in float32",
}  # fmt: skip


@dataclass(kw_only=True)
class MeanFlowConfig(ObjectiveConfig):
    """`[objective]` with name = "mean_flow"."""

    name: str = setting("mean_flow", "objective")
    preconditioning: OneOf[str, PRECONDITIONINGS] = setting(
        "data_time", "scaling of the network's input, output and time; data_time: 1 - t"
    )
    tangent: Literal["predicted", "sampled", "head"] = setting(
        "predicted", "direction of du/dt: the network's velocity at t, as improved mean flows, that of its intermediate head, or "
        "the sample's, as mean flows",
    )
    guidance_max: float = setting(
        1.0, "largest guidance scale that the network is trained to take as an input, published: 8; 1: it takes none", ge=1,
        le=100,
    )  # fmt: skip
    equal_share: float = setting(0.5, "share of samples at two equal times, which are flow matching", ge=0, le=1)
    weight_power: float = setting(1.0, "power p of the weight 1 / (squared error + c)^p on a sample's loss; 0: none", ge=0, le=2)
    difference_step: float | None = setting(
        None, "step in t of the difference quotient du/dt; default: 0.002, 0.01 with TF32, 0.05 with weights sharded "
        "in bfloat16", ge=1e-4, le=0.2
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
        self.weighs_kept = config.guidance_max > 1
        self.untrained_forwards = 4 if self.weighs_kept else 2 if config.tangent == "sampled" else 3
        self.intermediate_share = 1.0 if config.tangent == "head" else None

    def attach(self, model: Any, entries: Entries) -> None:
        self.condition_kind = model.condition_kind

    def draw(self, shape: tuple[int, ...], batch: GlobalBatch, indices: Tensor) -> Draw:
        draw = self.with_duration(super().draw(shape, batch, indices), self.seed, "duration", indices, batch.attempt)
        if not self.weighs_kept:
            return draw
        words = philox.random_words(self.seed, "guidance", indices, 3, batch.attempt)
        scale, low, high = ((words + 0.5) / 2**32).to(torch.float32).unbind(1)
        interval = torch.stack((0.5 * low, 0.5 + 0.5 * high), dim=1)
        if draw.duration is None:
            interval = torch.tensor([[0.0, 1.0]]).to(interval).expand_as(interval)
        else:
            interval = torch.where(draw.duration[:, None] > 0, interval, interval.new_tensor([0.0, 1.0]))
        return draw._replace(guidance=torch.cat((self.config.guidance_max ** scale[:, None], interval), dim=1))

    def with_duration(self, draw: Draw, seed: int, purpose: str, numbers: Tensor, attempt: int = 0) -> Draw:
        u, share = philox.uniform(seed, purpose, numbers, attempt), self.config.equal_share
        if share == 1.0:
            return draw
        density = cast(LargerOfTwo, self.timestep_sampler.density)
        earlier = density.smaller(draw.t, (u - share).clamp_min(0.0) / (1.0 - share))
        return draw._replace(duration=torch.where(u < share, 0.0, draw.t - earlier).to(torch.float32))

    def loss(self, model: Network, batch: Microbatch, draw: Draw) -> LossTerms:
        x0, t, condition, guidance = batch.images, draw.t, batch.condition, draw.guidance
        duration = torch.zeros_like(t) if draw.duration is None else draw.duration
        a, b = self.path.coefficients(per_image(t, x0))
        x_t = a * x0 + b * draw.noise
        velocity = tangent = draw.noise - x0
        if guidance is not None and batch.kept is not None:
            guidance = torch.where(batch.kept[:, None] > 0, guidance, guidance.new_tensor([1.0, 0.0, 1.0]))
            velocity, tangent = self.guided(model, x_t, velocity, t, condition, guidance)
        elif self.config.tangent != "sampled":
            tangent = self.velocity(model, x_t, t, condition)
        slope = self.slope(model, x_t, tangent, t, duration, condition, guidance)
        mean_velocity, head = self.outputs(model, x_t, t, duration, condition, guidance)
        error = (mean_velocity + per_image(duration, x0) * slope - velocity).square().flatten(1).mean(1)  # [B]
        floor = _FLOOR[self.config.tangent] / x0[0].numel()
        loss, held_out = self.weighted(error, floor), error.detach()
        if head is not None:
            loss = loss + self.weighted((head - velocity).square().flatten(1).mean(1), floor)
        return LossTerms(draw.importance * loss, held_out, t, draw.importance * held_out)

    def weighted(self, error: Tensor, floor: float) -> Tensor:
        """Errors [B] with their weights, through which no gradient runs."""
        return error / (error.detach() + floor) ** self.config.weight_power if self.config.weight_power else error

    def outputs(
        self, model: Network, x: Tensor, t: Tensor, duration: Tensor, condition: Condition, guidance: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Mean velocity u(x, t - duration, t) of images x [B, C, H, W], float32 at least, and what a head has beside it.

        t, duration: [B]; guidance: [B, 3], see `Draw`.
        """
        further = () if guidance is None else (guidance,)
        output = cast(Any, model)(x, self.preconditioning.time(t), condition, duration, *further)
        output = output.to(torch.promote_types(output.dtype, torch.float32))
        return output[:, : x.shape[1]], output[:, x.shape[1] :] if self.config.tangent == "head" else None

    @torch.no_grad()
    def velocity(
        self, model: Network, x_t: Tensor, t: Tensor, condition: Condition, guidance: Tensor | None = None
    ) -> Tensor:
        """Velocity at t as the network predicts it, arguments as those of `outputs`."""
        of_times, head = self.outputs(model, x_t, t, torch.zeros_like(t), condition, guidance)
        return of_times if head is None else head

    @torch.no_grad()
    def guided(
        self, model: Network, x_t: Tensor, velocity: Tensor, t: Tensor, condition: Condition, guidance: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Guided velocity as target, and tangent, of samples with a velocity; arguments as those of `outputs`."""
        scale, low, high = guidance.unbind(1)
        scale = torch.where((low <= t) & (t <= high), scale, 1.0)
        always = guidance.new_tensor([0.0, 1.0]).expand(len(t), 2)
        of_class, of_null = (
            self.velocity(model, x_t, t, each, torch.cat((scales[:, None], always), dim=1))
            for each, scales in (
                (condition, scale),
                (self.condition_kind.drop(condition, torch.ones_like(t, dtype=torch.bool)), torch.ones_like(scale)),
            )
        )
        target = velocity + per_image(1.0 - 1.0 / scale, x_t) * (of_class - of_null)
        return target, target if self.config.tangent == "sampled" else of_class

    @torch.no_grad()
    def slope(
        self, model: Network, x_t: Tensor, tangent: Tensor, t: Tensor, duration: Tensor, condition: Condition,
        guidance: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Difference quotient du/dt along a tangent [B, C, H, W], of its shape; other arguments as those of `outputs`."""
        earlier = t - duration
        low, high = torch.maximum(t - self.step, earlier), (t + self.step).clamp_max(1.0)
        with torch.autocast(x_t.device.type, enabled=False):  # the ends differ by less than bfloat16 shows
            ends = [
                self.outputs(model, x_t + per_image(end - t, x_t) * tangent, end, end - earlier, condition, guidance)[0]
                for end in (low, high)
            ]
        # Of no width only where both times are 1, and the quotient has no weight.
        width = (high - low).clamp_min(torch.finfo(t.dtype).eps)
        return (ends[1] - ends[0]) / per_image(width, x_t)

    def introduction(self) -> str:
        calls, error = self.untrained_forwards, _ERRORS.get(self.step)
        off = f" ({error})" if error else ""
        return (
            f"mean flow: du/dt over steps of {self.step:g} in t{off}; {calls} calls of the network without gradient make a step"
            f" {(3 + calls) / 3:.2f} times the FLOPs of denoising"
        )

    @classmethod
    def problems(cls, config: MeanFlowConfig) -> Iterator[tuple[str, str]]:
        """Refuse what has no mean velocity of two drawn times, and times of the network too fast for a difference quotient."""
        wanted = {"path": "rectified_flow", "prediction": "velocity", "preconditioning": "data_time"}
        for key, value in wanted.items():
            if (given := getattr(config, key)) != value:
                yield f"objective.{key}", f"{given} is not for objective.name = mean_flow (use {value})"
        if config.timesteps.name in SAMPLERS:
            text = f"{config.timesteps.name} draws one time, and objective.name = mean_flow two (use a density, as logit_normal)"
            yield "objective.timesteps.name", text
