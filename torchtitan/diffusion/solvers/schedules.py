"""Time schedules of solvers: times [N + 1], falling to 0; float64 on the CPU."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, cast

import torch
from torch import Tensor

from torchtitan.diffusion.paths import Path, indexed
from torchtitan.diffusion.solvers.contract import ScheduleConfig, Trained
from torchtitan.settings import setting


def uniform_times(num_steps: int, t_max: float = 1.0, shift: float = 1.0, last_step: float = 0.0) -> Tensor:
    """Uniform times: num_steps + 1 equally spaced ones from t_max to 0, moved towards noise by `shift`.

    With a last_step, that is the size of the last step, and the others are equal (as in SiT's code).

    With u = t / t_max, the shift is u -> shift u / (1 + (shift - 1) u); 1 leaves the times, and on t_max = 1 it is
    sigma -> shift sigma.

    Source: Esser et al., "Scaling rectified flow transformers", arXiv 2403.03206, eq. 23.
    """
    if last_step:
        u = torch.linspace(1.0, last_step / t_max, num_steps, dtype=torch.float64)
        u = torch.cat((u, u.new_zeros(1)))
    else:
        u = torch.linspace(1.0, 0.0, num_steps + 1, dtype=torch.float64)
    return t_max * (shift * u / (1.0 + (shift - 1.0) * u))


def flux_log_shift(num_tokens: int) -> float:
    """Log of the factor on sigma by which FLUX.1 [dev] shifts its times: mu, linear in the tokens of an image.

    0.5 at 256 tokens (256 x 256 pixels) and 1.15 at 4096 (1024 x 1024), on the same line beyond both.

    Source: black-forest-labs' sampling code of FLUX.1; with shift = e^mu, `uniform_times` is its
    t -> e^mu / (e^mu + 1 / t - 1).
    """
    return 0.5 + (num_tokens - 256) * (1.15 - 0.5) / (4096 - 256)


RHO = 7.0  # EDM's, eq. 5


def edm_times(num_steps: int, sigma_min: float = 0.002, sigma_max: float = 80.0) -> Tensor:
    """Times of num_steps noise levels from sigma_max to sigma_min, equally spaced in sigma^(1 / 7), and 0.

    Source: Karras et al., "Elucidating the design space of diffusion-based generative models", eq. 5.
    """
    first, last = sigma_max ** (1.0 / RHO), sigma_min ** (1.0 / RHO)
    sigma = torch.linspace(first, last, num_steps, dtype=torch.float64) ** RHO
    return torch.cat((sigma / (1.0 + sigma), sigma.new_zeros(1)))


def respaced_indices(num_steps: int, total: int = 1000) -> Tensor:
    """Respaced indices: num_steps of total - 1 .. 0, evenly spaced with both ends and rounded (half to even), falling.

    A single step starts from total - 1.

    Raises:
        ValueError: num_steps is not in 1 .. total.

    Source: Nichol and Dhariwal, "Improved denoising diffusion probabilistic models", arXiv 2102.09672, section 4.
    """
    if not 1 <= num_steps <= total:
        raise ValueError(f"{num_steps} steps cannot be chosen from {total} noise levels (use 1 to {total})")
    return torch.linspace(total - 1, 0, num_steps, dtype=torch.float64).round().to(torch.int64)


def leading_indices(num_steps: int, total: int = 1000) -> Tensor:
    """Indices 0, s, 2 s, ... of the whole stride s = total // num_steps, falling.

    Those of `timestep_spacing = "leading"` of diffusers and, where num_steps divides total, of "ddimN" in ADM's code.
    """
    return (torch.arange(num_steps) * (total // num_steps)).flip(0)


def trailing_indices(num_steps: int, total: int = 1000) -> Tensor:
    """Indices total - 1, ... of the stride total / num_steps, rounded (half to even), falling.

    Source: Lin et al., "Common diffusion noise schedules and sample steps are flawed", arXiv 2305.08891, table 2; it is
    `timestep_spacing = "trailing"` of diffusers.
    """
    steps = torch.arange(num_steps, dtype=torch.float64)
    return (total - steps * (total / num_steps)).round().to(torch.int64) - 1


SPACINGS = {"even": respaced_indices, "leading": leading_indices, "trailing": trailing_indices}


def ddpm_times(num_steps: int, path: Path, spacing: str = "even") -> Tensor:
    """Times of indices of a DDPM path chosen by a key of SPACINGS, and 0."""
    times = indexed(path).index_to_t(SPACINGS[spacing](num_steps, path.num_indices)).to(torch.float64)
    return torch.cat((times, times.new_zeros(1)))


@dataclass(kw_only=True)
class UniformScheduleConfig(ScheduleConfig):
    """Equally spaced in t."""

    shift: float | Literal["objective"] = setting(
        1.0, "factor on sigma that moves the steps towards noise: 1 is none, objective that of training, the default with "
        "objective.shift = latent_size", gt=0,
    )  # fmt: skip
    last_step: float = setting(0.0, "size of the last step in t, the others being equal; 0: as large as they", ge=0)

    def times(self, path: Path, num_steps: int, num_tokens: Callable[[], int]) -> Tensor:
        return uniform_times(num_steps, path.t_max, cast(float, self.shift), self.last_step)

    def resolved(self, trained_shift: float) -> ScheduleConfig:
        return replace(self, shift=trained_shift) if self.shift == "objective" else self

    def problems(self, trained: Trained, num_steps: int) -> Iterator[tuple[str, str]]:
        yield from super().problems(trained, num_steps)
        if self.last_step and self.shift != 1.0:
            yield "schedule.last_step", f"its size is not kept by sampling.schedule.shift = {self.shift:g} (give one of them)"
        elif self.last_step >= trained.path.t_max:
            yield "schedule.last_step", f"{self.last_step:g} leaves nothing of {trained.path.t_max:g} (make it smaller)"


@dataclass(kw_only=True)
class FluxShiftScheduleConfig(ScheduleConfig):
    """Equally spaced in t, then moved towards noise the more tokens an image has."""

    def times(self, path: Path, num_steps: int, num_tokens: Callable[[], int]) -> Tensor:
        return uniform_times(num_steps, path.t_max, math.exp(flux_log_shift(num_tokens())))


@dataclass(kw_only=True)
class EDMScheduleConfig(ScheduleConfig):
    """Equally spaced in sigma^(1 / 7)."""

    sigma_min: float = setting(0.002, "lowest noise level before 0", gt=0)
    sigma_max: float = setting(80.0, "noise level of the first step", gt=0)

    def times(self, path: Path, num_steps: int, num_tokens: Callable[[], int]) -> Tensor:
        return edm_times(num_steps, self.sigma_min, self.sigma_max)

    def problems(self, trained: Trained, num_steps: int) -> Iterator[tuple[str, str]]:
        yield from super().problems(trained, num_steps)
        if self.sigma_min >= self.sigma_max:
            text = f"{self.sigma_min:g} is not below sampling.schedule.sigma_max = {self.sigma_max:g} (make it smaller)"
            yield "schedule.sigma_min", text


@dataclass(kw_only=True)
class DDPMScheduleConfig(ScheduleConfig):
    """Some of the indices of a DDPM path."""

    spacing: Literal["even", "leading", "trailing"] = setting(
        "even", "even: from the last index to 0; leading: multiples of a stride, without the last index, as DDIM's; trailing: "
        "from the last index by a stride, without 0"
    )

    def times(self, path: Path, num_steps: int, num_tokens: Callable[[], int]) -> Tensor:
        return ddpm_times(num_steps, path, self.spacing)

    def problems(self, trained: Trained, num_steps: int) -> Iterator[tuple[str, str]]:
        trained_on, indices = f"objective.path = {trained.path_name}", trained.path.num_indices
        if not indices:
            yield "schedule.name", f"{trained_on} has no DDPM indices (use uniform or edm)"
        elif num_steps > indices:
            text = f"{num_steps} steps cannot be chosen from the {indices} indices of {trained_on}"
            yield "num_steps", f"{text} (use at most {indices})"
