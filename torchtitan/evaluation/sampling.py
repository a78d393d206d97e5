"""Images drawn from the model during and after training, every rank drawing its share."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from tqdm import tqdm

from torchtitan import philox
from torchtitan.diffusion.guidance import Guidance, predictor
from torchtitan.diffusion.objective import Objective
from torchtitan.diffusion.paths import PATHS
from torchtitan.diffusion.solvers import SCHEDULES, SOLVERS
from torchtitan.distributed.precision import compute_context
from torchtitan.evaluation.eval_mode import evaluating
from torchtitan.settings import setting


@dataclass(kw_only=True)
class SamplingConfig:
    """`[sampling]`: the grids drawn during training, and the defaults of scripts/sample.py."""

    enable: bool = setting(True, "draw a grid of samples at intervals and at the end", trajectory=False)
    interval: int = setting(1000, "steps between grids", ge=1, applies={"enable": (True,)}, trajectory=False)
    solver: Literal[tuple(SOLVERS)] = setting(
        "euler", "integrator from noise to image", applies={"enable": (True,)}, trajectory=False
    )
    num_steps: int = setting(
        50, "solver steps from noise to image", ge=1, le=1_000_000, applies={"enable": (True,)}, trajectory=False
    )
    schedule: Literal["uniform", "edm", "ddpm"] = setting(
        "uniform", "times of the steps: equally spaced in t, in sigma^(1/rho), or in DDPM indices (the default on"
        " discrete paths)", applies={"enable": (True,)}, trajectory=False,
    )
    shift: float = setting(
        1.0, "factor on sigma that moves the steps towards noise: 1 is none", gt=0,
        applies={"enable": (True,), "schedule": ("uniform",)}, trajectory=False,
    )
    sigma_min: float = setting(
        0.002, "lowest noise level before 0", gt=0, applies={"enable": (True,), "schedule": ("edm",)}, trajectory=False
    )
    sigma_max: float = setting(
        80.0, "noise level of the first step", gt=0, applies={"enable": (True,), "schedule": ("edm",)},
        trajectory=False,
    )
    rho: float = setting(
        7.0, "larger values make the steps near data shorter", gt=0,
        applies={"enable": (True,), "schedule": ("edm",)}, trajectory=False,
    )
    ddim_eta: float = setting(
        0.0, "share of fresh noise: 0 is deterministic, 1 DDPM", ge=0, le=1,
        applies={"enable": (True,), "solver": ("ddim",)}, trajectory=False,
    )
    ddpm_variance: Literal["small", "large", "learned"] = setting(
        "small", "variance of a step: the posterior's, the forward process's, or the model's",
        applies={"enable": (True,), "solver": ("ddpm",)}, trajectory=False,
    )
    churn: float = setting(
        0.0, "noise added over all steps, EDM's S_churn: 0 is deterministic", ge=0,
        applies={"enable": (True,), "solver": ("edm_heun",)}, trajectory=False,
    )
    churn_min: float = setting(
        0.05, "lowest sigma of churn, S_min", ge=0, applies={"enable": (True,), "churn": ">0"}, trajectory=False
    )
    churn_max: float = setting(
        50.0, "highest sigma of churn, S_max", ge=0, applies={"enable": (True,), "churn": ">0"}, trajectory=False
    )
    churn_noise: float = setting(
        1.003, "deviation of the noise of churn, S_noise", gt=0, applies={"enable": (True,), "churn": ">0"},
        trajectory=False,
    )
    diffusion: Literal["sigma", "sin_squared", "constant"] = setting(
        "sigma", "squared diffusion w_t of the stochastic flow: t, sin^2(pi t), or 1",
        applies={"enable": (True,), "solver": ("euler_maruyama",)}, trajectory=False,
    )
    diffusion_scale: float = setting(
        1.0, "factor on the squared diffusion", ge=0, applies={"enable": (True,), "solver": ("euler_maruyama",)},
        trajectory=False,
    )
    guidance_scale: float = setting(
        2.0, "classifier-free guidance: 1 is none", ge=0, applies={"enable": (True,)}, trajectory=False
    )
    guidance_interval: list[float] = setting(
        [0.0, 1.0], "lowest and highest t with guidance; the plain conditional model outside",
        applies={"enable": (True,)}, trajectory=False,
    )
    guidance_channels: Literal["all", "first_three"] = setting(
        "all", "channels with guidance; the plain conditional model's beyond", applies={"enable": (True,)},
        trajectory=False,
    )
    classes: list[int] = setting(
        [], "classes of the grid, a row each; empty: the first ten", applies={"enable": (True,)}, trajectory=False
    )
    images_per_class: int = setting(
        8, "columns of the grid", ge=1, le=10_000, applies={"enable": (True,)}, trajectory=False
    )
    ema_track: str = setting(
        "ema", "weights to sample with: a name of ema.tracks, or 'none' for the trained weights",
        applies={"enable": (True,)}, trajectory=False,
    )
    judge_images: int = setting(
        0, "images drawn at the end and judged against real ones; 0: none (the dataset must have a judge)", ge=0,
        le=10_000_000, applies={"enable": (True,)}, trajectory=False,
    )
    batch_size: int = setting(
        256, "images drawn at a time on each rank", ge=1, le=1_000_000, applies={"enable": (True,)}, trajectory=False
    )

    def method(self) -> dict[str, Any]:
        """How images are drawn, as keyword arguments of `ImageSampler.draw`."""
        return {
            "solver": self.solver,
            "num_steps": self.num_steps,
            "guidance_scale": self.guidance_scale,
            "guidance_interval": tuple(self.guidance_interval),
            "guidance_channels": self.guidance_channels,
            "schedule": self.schedule,
            "solver_options": {option: getattr(self, key) for option, key in SOLVER_KEYS.get(self.solver, {}).items()},
            "schedule_options": {option: getattr(self, option) for option in SCHEDULE_KEYS[self.schedule]},
        }


# solver -> its option -> the key of `[sampling]`
SOLVER_KEYS = {
    "ddim": {"eta": "ddim_eta"},
    "ddpm": {"variance": "ddpm_variance"},
    "edm_heun": {key: key for key in ("churn", "churn_min", "churn_max", "churn_noise")},
    "euler_maruyama": {key: key for key in ("diffusion", "diffusion_scale")},
}
# schedule -> its options, keys of `[sampling]`
SCHEDULE_KEYS = {"uniform": ("shift",), "edm": ("sigma_min", "sigma_max", "rho"), "ddpm": ()}


def sampling_problems(
    config: SamplingConfig, path_name: str, learned_variance: bool, heads: bool = False
) -> list[tuple[str, str]]:
    """Why a model cannot be sampled in this way.

    Args:
        config: how it is to be sampled.
        path_name: a key of PATHS, the path that it was trained on.
        learned_variance: whether it has learned the variance of the reverse step.
        heads: whether it makes several predictions.

    Returns:
        (key of `[sampling]`, what is wrong and what to do) of each problem.
    """
    path, found, trained_on = PATHS[path_name](), [], f"objective.path = {path_name}"
    if len(config.guidance_interval) != 2:
        found.append(("guidance_interval", f"takes two times, has {len(config.guidance_interval)} (as [0.0, 1.0])"))
    elif not 0.0 <= config.guidance_interval[0] <= config.guidance_interval[1] <= 1.0:
        low, high = config.guidance_interval
        reason = "runs backwards" if low > high else "leaves 0..1"
        found.append(("guidance_interval", f"[{low:g}, {high:g}] {reason} (give the lower t first, both in 0..1)"))
    indices = getattr(path, "num_indices", 0)
    if config.schedule == "ddpm" and not indices:
        found.append(("schedule", f"{trained_on} has no DDPM indices (use uniform or edm)"))
    elif config.schedule == "ddpm" and config.num_steps > indices:
        text = f"{config.num_steps} steps cannot be chosen from the {indices} indices of {trained_on}"
        found.append(("num_steps", f"{text} (use at most {indices})"))
    elif config.schedule != "ddpm" and path.discrete:
        found.append(("schedule", f"{trained_on} is trained at integer indices only (use ddpm)"))
    if config.schedule == "edm" and config.sigma_min >= config.sigma_max:
        text = f"{config.sigma_min:g} is not below sampling.sigma_max = {config.sigma_max:g} (make it smaller)"
        found.append(("sigma_min", text))
    if config.solver == "euler_maruyama" and path_name != "rectified_flow":
        text = f"euler_maruyama is for rectified_flow, and {trained_on} (use ddpm, or edm_heun with churn)"
        found.append(("solver", text))
    if config.solver == "edm_heun" and config.schedule == "uniform" and path.t_max >= 1.0:
        text = f"edm_heun needs a finite sigma to start from, and {trained_on} (use sampling.schedule = edm)"
        found.append(("solver", text))
    if config.solver == "edm_heun" and config.churn > 0 and config.churn_min > config.churn_max:
        text = f"{config.churn_min:g} is above sampling.churn_max = {config.churn_max:g} (make it smaller)"
        found.append(("churn_min", text))
    if config.solver == "ddpm" and config.ddpm_variance == "learned" and not learned_variance:
        text = "the model has not learned the variance (use small or large, or train with model.learned_variance)"
        found.append(("ddpm_variance", text))
    if heads and config.guidance_channels != "all":
        found.append(("guidance_channels", "first_three is for a network of one prediction (use all)"))
    return found


def default_schedule(path_name: str) -> str:
    """The schedule of a path when none is given: the trained indices of a discrete path, EDM's own, else uniform."""
    return "ddpm" if PATHS[path_name]().discrete else "edm" if path_name == "edm" else "uniform"


def grid_labels(classes: Sequence[int], num_classes: int, images_per_class: int) -> Tensor:
    """Labels of a grid, row by row [rows * images_per_class]; classes empty: the first ten, or one row of none."""
    rows = list(classes) or list(range(min(num_classes, 10))) or [0]
    return torch.tensor(rows).repeat_interleave(images_per_class)


def balanced_labels(count: int, num_classes: int) -> Tensor:
    """`count` labels that run through the classes, each as often as any other up to one."""
    return torch.arange(count) % max(num_classes, 1)


class ImageSampler:
    """Draws images from a model, sharded over the ranks, from random numbers of its own.

    The image for a number and a class is the same on any number of ranks, and drawing it leaves every random
    state of training alone.
    """

    def __init__(self, model: nn.Module, objective: Objective, param_dtype: str, device: torch.device) -> None:
        """model: the whole or sharded model (not its DDP wrapper); param_dtype: dtype of compute."""
        self._model = model
        self._objective = objective
        self._param_dtype = param_dtype
        self._device = device

    @torch.no_grad()
    def draw(
        self,
        labels: Tensor,
        seed: int,
        *,
        solver: str,
        num_steps: int,
        guidance_scale: float,
        batch_size: int,
        guidance_interval: tuple[float, float] = (0.0, 1.0),
        guidance_channels: str = "all",
        schedule: str = "uniform",
        solver_options: dict[str, Any] | None = None,
        schedule_options: dict[str, float] | None = None,
        first_number: int = 0,
        sharded: bool = False,
        purpose: str = "sampling",
        progress: bool = False,
    ) -> Tensor:
        """Draw one image per label; called by all ranks together.

        Args:
            labels: class of each image [N], int64; ignored by an unconditional model.
            seed: of the images' noise.
            solver: a key of SOLVERS.
            num_steps: solver steps.
            guidance_scale: 1 for none.
            batch_size: images at a time on each rank.
            guidance_interval, guidance_channels: as in `Guidance`.
            schedule: a key of SCHEDULES.
            solver_options, schedule_options: keyword arguments of the two; their defaults where not given.
            first_number: number of the first image; image i starts from noise of number first_number + i.
            sharded: whether the model's parameters are sharded.
            purpose: random stream of the starting noise.
            progress: show a bar over the batches.

        Returns:
            float32 images [N, C, H, W] on the CPU, on every rank.
        """
        rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        share = math.ceil(len(labels) / ranks)
        # Every rank makes the same number of forwards, or a sharded model would wait for ever.
        mine = (torch.arange(share) + rank * share).clamp(max=len(labels) - 1)
        path = self._objective.path
        times = SCHEDULES[schedule](path, num_steps, **schedule_options or {})
        solve = functools.partial(SOLVERS[solver], path=path, times=times, **solver_options or {})
        guidance = Guidance(guidance_scale, guidance_interval, guidance_channels)
        with evaluating(self._model), compute_context(self._param_dtype, self._device, sharded):
            parts = [
                self._draw_batch(labels[chunk], chunk + first_number, seed, purpose, solve, times[0], guidance)
                for chunk in tqdm(mine.split(batch_size), unit="batch", disable=not progress)
            ]
        images = torch.cat(parts)
        if ranks > 1:
            gathered = [torch.empty_like(images) for _ in range(ranks)]
            dist.all_gather(gathered, images)
            images = torch.cat(gathered)
        return images[: len(labels)].cpu()

    def _draw_batch(
        self, labels: Tensor, numbers: Tensor, seed: int, purpose: str, solve: Callable[..., Tensor], start: Tensor,
        guidance: Guidance,
    ) -> Tensor:
        labels, numbers = labels.to(self._device), numbers.to(self._device)
        shape = self._model.image_shape
        noise = philox.normal(seed, purpose, numbers, shape)
        null_class = self._model.null_class
        condition = None if null_class is None else labels
        predict = predictor(self._objective, self._model, condition, null_class, guidance)
        # Step s of image n adds noise of its own number, apart from the starting noise of any other image.
        draw_noise = lambda step: philox.normal(seed, purpose, numbers + ((step + 1) << 40), shape)  # noqa: E731
        _, b = self._objective.path.coefficients(start)
        return solve(predict=predict, x=b * noise, draw_noise=draw_noise)
