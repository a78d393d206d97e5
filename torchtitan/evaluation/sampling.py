"""Sampling from the model during and after training, every rank drawing its share."""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from torchtitan import philox
from torchtitan.conditions import Classes, ConditionKind, each_tensor
from torchtitan.diffusion.guidance import Guidance, Guide, HeadGuide, over_duration, predictor
from torchtitan.diffusion.objective import Objective
from torchtitan.diffusion.solvers import ScheduleConfig, SolverConfig
from torchtitan.distributed.precision import compute_context
from torchtitan.evaluation.eval_mode import evaluating
from torchtitan.evaluation.sample_plans import SampleSetError
from torchtitan.models.base import DiffusionModel
from torchtitan.pictures.grids import class_labels

# (numbers of the conditions [B], numbers of the images [B]) -> images [B, C, H, W]
DrawBatch = Callable[[Tensor, Tensor], Tensor]
STATE_DTYPES = {"float32": torch.float32, "float64": torch.float64}


def grid_choices(rows: Sequence[int], count: int, images_per_row: int) -> Tensor:
    """Choices of a grid's conditions, row by row [rows * images_per_row]; rows empty: the first ten of `count`, or one row."""
    rows = list(rows) or list(range(min(count, 10))) or [0]
    return torch.tensor(rows).repeat_interleave(images_per_row)


def grid_labels(rows: Sequence[int], kind: ConditionKind) -> list[str] | None:
    """Labels of a grid's rows: classes by `class_labels`, prompts whole; None: they have no names."""
    if isinstance(kind, Classes) or not kind.choice_names:
        return class_labels(rows, kind.choice_names)
    return [kind.choice_names[row] for row in rows]


def guidance_text(scale: float, kind: ConditionKind) -> str:
    """Guidance, for a grid's title; "" for samples without conditions and guide."""
    return f"guidance {scale:g}" if kind.choices or scale != 1 else ""


def balanced_choices(num_images: int, count: int) -> Tensor:
    """Choices for `num_images` images among `count` conditions, each as often as any other up to one."""
    return torch.arange(num_images) % max(count, 1)


class ImageSampler:
    """Image sampler for a model, with its own random numbers.

    The image for a number and a condition is the same on any number of ranks, and leaves training's random state.
    """

    def __init__(
        self, model: DiffusionModel, objective: Objective, param_dtype: str, device: torch.device,
        condition_kind: ConditionKind | None = None,
    ) -> None:  # fmt: skip
        """Keep what is drawn with.

        Args:
            model: the whole or sharded model (not its DDP wrapper).
            condition_kind: conditions to draw by, such as those of other prompts; None: the model's.
        """
        self._model = model
        self._condition_kind = condition_kind or model.condition_kind
        self._objective = objective
        self._param_dtype = param_dtype
        self._device = device
        self.evaluations: list[int] = []  # of the (guided) network, in each batch that was drawn

    @torch.no_grad()
    def draw(
        self, choices: Tensor, seed: int, *, batch_size: int, first_number: int = 0, purpose: str = "sampling",
        sharded: bool = False, progress: bool = False, **method: Any,
    ) -> Tensor:  # fmt: skip
        """Draw one image per choice; called by all ranks together, each draws its share.

        Args:
            choices: numbers [N], int64, of conditions that the kind knows, as classes; unused if unconditional.
            first_number: number of the first image; image i starts from noise of number first_number + i.
            purpose: random stream of the starting noise.

        Returns:
            float32 images [N, C, H, W] on the CPU, on every rank.
        """
        rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        share = math.ceil(len(choices) / ranks)
        # Every rank makes the same number of forwards, or a sharded model would wait for ever.
        mine = (torch.arange(share) + rank * share).clamp(max=len(choices) - 1)
        with self.drawing(seed, purpose=purpose, sharded=sharded, **method) as draw_batch:
            parts = [
                draw_batch(choices[chunk], chunk + first_number)
                for chunk in tqdm(mine.split(batch_size), "drawing", unit="batch", delay=2, disable=not progress)
            ]
        images = torch.cat(parts)
        if ranks > 1:
            gathered = [torch.empty_like(images) for _ in range(ranks)]
            dist.all_gather(gathered, images)
            images = torch.cat(gathered)
        return images[: len(choices)].cpu()

    @contextmanager
    def drawing(
        self, seed: int, *, solver: SolverConfig, num_steps: int, schedule: ScheduleConfig, guidance: Guidance,
        guide: Guide | HeadGuide | None = None, embedded_guidance: float | None = None,
        image_shape: tuple[int, int, int] | None = None, clip_x0: bool = False, state_dtype: str = "float32",
        purpose: str = "sampling", sharded: bool = False,
    ) -> Iterator[DrawBatch]:  # fmt: skip
        """Draw batches on this rank by one method, inside the context, in eval mode and the dtype of compute.

        Args:
            guide: reference of guidance; None for the null condition.
            embedded_guidance: scale that networks with a guidance embedding are given, a guide's too, with the interval of
                `guidance` where they take one; None for that of their training, which they have again afterwards.
            image_shape: (C, H, W) to draw; None for the model's, which is the only one of most models.
            state_dtype: of the solver's state, a key of STATE_DTYPES.

        Yields:
            function (choices [B], numbers [B]) -> float32 images [B, C, H, W] on the device.
        """
        path = self._objective.path
        shape, kind, dtype = image_shape or self._model.image_shape, self._condition_kind, STATE_DTYPES[state_dtype]
        times = schedule.times(path, num_steps, lambda: self._model.tokens_per_image(shape))
        solve = functools.partial(solver.solve, path=path, times=times, **solver.options())
        _, start = path.coefficients(times[0])

        def draw_normal(numbers: Tensor) -> Tensor:
            # On the CPU: logarithms and cosines of other devices differ in the last digit, and a seed has one noise.
            return self._objective.scaled(philox.normal(seed, purpose, numbers.cpu(), shape).to(self._device))

        @torch.no_grad()
        def draw_batch(choices: Tensor, numbers: Tensor) -> Tensor:
            noise = draw_normal(numbers).to(dtype)
            condition = each_tensor(kind.choose(choices), lambda value: value.to(self._device))
            rest = kind, condition, guidance, guide, clip_x0
            predict = predictor(self._objective, self._model, *rest)

            def draw_noise(step: int) -> Tensor:
                # Step s of image n adds noise of a separate number, different from the starting noise of any other image.
                return draw_normal(numbers + ((step + 1) << 40))

            self.evaluations.append(0)

            def counted(x: Tensor, t: Tensor, duration: Tensor | None = None) -> tuple:
                self.evaluations[-1] += 1
                if duration is None:
                    return predict(x, t)
                return predictor(self._objective, over_duration(self._model, duration[:1]), *rest)(x, t)

            drawn = solve(predict=counted, x=start * noise, draw_noise=draw_noise)
            if not isinstance(drawn, Tensor) or drawn.shape != noise.shape:
                found = f"of shape {list(drawn.shape)}" if isinstance(drawn, Tensor) else f"of {type(drawn).__name__}"
                raise SampleSetError(f"sampling.solver: its result is {found}, and the images are {list(noise.shape)}")
            return drawn.float()

        networks = [self._model, guide.network if isinstance(guide, Guide) else None]
        with (
            _given_guidance([each for each in networks if isinstance(each, DiffusionModel)], embedded_guidance, guidance),
            evaluating(self._model),
            compute_context(self._param_dtype, self._device, sharded),
        ):
            yield draw_batch


@contextmanager
def _given_guidance(networks: Sequence[DiffusionModel], scale: float | None, guidance: Guidance) -> Iterator[None]:
    """Give the networks another embedded guidance for the block."""
    try:
        for network in networks:
            network.set_guidance(scale, guidance.interval)
        yield
    finally:
        for network in networks:
            network.set_guidance(None)
