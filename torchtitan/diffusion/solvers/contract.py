"""Contract of solvers: predictions of the clean image and the noise, and fresh noise."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from torchtitan.diffusion.paths import Path
from torchtitan.settings import setting
from torchtitan.settings.sections import keys


class Prediction(NamedTuple):
    """Prediction: estimates from x_t = a x0 + b noise by a network.

    Attributes:
        x0, noise: estimates, of x_t's shape, with a x0 + b noise = x_t.
        variance_fraction: learned variance of the reverse step, 0 for its lower and 1 for its upper bound (Nichol
            and Dhariwal, arXiv 2102.09672, eq. 15), of x_t's shape; None when the network has not learned it.
    """

    x0: Tensor
    noise: Tensor
    variance_fraction: Tensor | None = None


# (x_t [B, ...], t [B], all equal) -> a Prediction, or the plain pair (x0, noise)
Predict = Callable[[Tensor, Tensor], tuple]
# (x_t [B, ...], t [B], duration [B]) -> the same by the mean velocity over the duration before t
TwoTimePredict = Callable[[Tensor, Tensor, Tensor], tuple]
# number of the step -> standard normal noise of x's shape
DrawNoise = Callable[[int], Tensor]


# (predict, path, x at times[0], times, draw_noise, **options) -> x at times[-1]
Solver = Callable[..., Tensor]


@dataclass(frozen=True)
class Trained:
    """What a solver is checked against: path_name, a key of PATHS; whether the reverse step's variance is learned."""

    path_name: str
    path: Path
    learned_variance: bool


@dataclass(kw_only=True)
class ScheduleConfig:
    """`[sampling.schedule]`: base of the keys of every schedule of times."""

    name: str = setting("", "times of the solver's steps; default: the trained path's")

    def times(self, path: Path, num_steps: int, num_tokens: Callable[[], int]) -> Tensor:
        """Times [num_steps + 1] that a solver visits, falling to 0; float64 on the CPU.

        Args:
            num_tokens: returns the tokens of an image that is drawn; called only where the times depend on it.
        """
        raise NotImplementedError

    def resolved(self, trained_shift: float) -> "ScheduleConfig":
        """Section with values for what follows from the shift of the training timesteps."""
        return self

    def problems(self, trained: Trained, num_steps: int) -> Iterator[tuple[str, str]]:
        """Problems of sampling at these times: pairs of a key of `[sampling]` and the reason."""
        if trained.path.discrete:
            text = f"objective.path = {trained.path_name} is trained at integer indices only (use ddpm)"
            yield "schedule.name", text


@dataclass(kw_only=True)
class SolverConfig:
    """`[sampling.solver]`: base of solvers' keys, options of `solve`.

    adaptive: evaluations depend on the images; two_times: `solve` takes a `TwoTimePredict`.
    """

    name: str = setting("", "integrator from noise to image")

    solve: ClassVar[Solver]
    adaptive: ClassVar[bool] = False
    two_times: ClassVar[bool] = False

    def options(self) -> dict[str, Any]:
        """Keyword arguments of `solve`."""
        return {key.name: getattr(self, key.name) for key in keys(self) if key.name != "name"}

    def problems(self, trained: Trained, schedule: ScheduleConfig) -> Iterator[tuple[str, str]]:
        """Problems of sampling with this solver: pairs of a key of this section and the reason."""
        yield from ()


def predict_at(predict: Predict, x: Tensor, t: Tensor) -> Prediction:
    """Prediction for a batch x at one time t (a tensor without dimensions)."""
    return Prediction(*predict(x, t.to(x).expand(len(x))))


def noise_ratio(path: Path, now: Tensor, then: Tensor) -> Tensor:
    """Ratio of noise levels sigma(then) / sigma(now), also where sigma(now) is infinite."""
    (a, b), (a_then, b_then) = path.coefficients(now), path.coefficients(then)
    return (b_then * a) / (a_then * b)


def steps(times: Tensor) -> zip:
    """Steps: (number, time, next time) of each."""
    return zip(range(len(times) - 1), times[:-1], times[1:], strict=True)


def positive(value: Tensor) -> bool:
    """Check whether a noise of this deviation must be drawn at all."""
    return bool(torch.any(value > 0))
