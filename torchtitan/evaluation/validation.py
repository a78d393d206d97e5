"""Validation loss on held-out images: fixed (image, timestep, noise), so that measurements differ by weights.
"""

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan import philox
from torchtitan.diffusion.objective import Draw, Microbatch, Objective
from torchtitan.diffusion.paths import indexed
from torchtitan.distributed.precision import compute_context
from torchtitan.evaluation.eval_mode import evaluating
from torchtitan.models.base import DiffusionModel


def held_out_draw(
    objective: Objective, seed: int, indices: Tensor, count: int, shape: tuple[int, ...], timesteps: Sequence[float] = ()
) -> Draw:
    """Draw of held-out images: the training density's quantiles, one per image, or given timesteps; and fixed noise.

    Args:
        indices: numbers of the images [B] out of `count`.
        count: held-out images in all.
        timesteps: image i is at timestep i mod K of these K; on a path in steps, at the nearest one of the path.
    """
    if timesteps:
        given = torch.tensor(timesteps, dtype=torch.float64, device=indices.device)
        if objective.path.discrete:
            path = indexed(objective.path)
            given = path.index_to_t(path.t_to_index(given))
        t = given[indices % len(given)].to(torch.float32)
    else:
        # Images are in the data's order; a fixed shuffle makes their timesteps independent of it.
        order = philox.uniform(seed, "validation", torch.arange(count, device=indices.device)).argsort()
        quantile = (order[indices].to(torch.float64) + 0.5) / count
        t = objective.timestep_sampler.density.quantile(quantile).to(torch.float32)
    noise = objective.scaled(philox.normal(seed, "validation", indices + (1 << 40), shape))
    return objective.with_duration(Draw(t, noise, torch.ones_like(t)), seed, "validation", indices + (1 << 41))


class MeansByTime:
    """Means with standard errors of images' losses: of all, and by timestep bin or by the place of given timesteps."""

    def __init__(self, bin_edges: Tensor, timesteps: Sequence[float], device: torch.device) -> None:
        """bin_edges: inner edges in t, rising, [K - 1]; timesteps: image i at timestep i mod K of these instead."""
        self._edges, self._part = bin_edges, "time" if timesteps else "bin"
        self._timesteps, self._bins = len(timesteps), len(timesteps) or len(bin_edges) + 1
        # (weights, values, squares) of each bin, and of all images in the last place.
        self._sums = torch.zeros(3, self._bins + 1, dtype=torch.float64, device=device)

    def add(self, indices: Tensor, t: Tensor, weights: Tensor, by_bin: Tensor, whole: Tensor) -> None:
        """Add images [B], by number, timestep and weight (0: padding): losses for means by bin, and over all."""
        which = indices % self._timesteps if self._timesteps else torch.bucketize(t, self._edges)
        for where, values in ((which, by_bin), (torch.full_like(which, self._bins), whole)):
            values = values.to(torch.float64)
            moments = torch.stack([torch.ones_like(values), values, values.square()])  # [3, B]
            self._sums.index_add_(1, where, moments * weights)

    def metrics(self) -> dict[str, float]:
        """Means and standard errors over all ranks, by tag; collective."""
        found: dict[str, float] = {}
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(self._sums)
        for place in (self._bins, *range(self._bins)):
            ending = "" if place == self._bins else f"_by_{self._part}/{place}"
            number, total, squares = self._sums[:, place].tolist()
            if number > 0:
                found[f"loss{ending}"] = total / number
            if number > 1:
                variance = max(squares - total**2 / number, 0.0) / (number - 1)
                found[f"loss_stderr{ending}"] = math.sqrt(variance / number)
        return found


@torch.no_grad()
def validation_loss(
    model: DiffusionModel, objective: Objective, batches: Iterable[dict[str, Tensor]], *, count: int, seed: int,
    bin_edges: Tensor, param_dtype: str, device: torch.device, sharded: bool, timesteps: Sequence[float] = (),
) -> dict[str, float]:  # fmt: skip
    """Validation loss over held-out images, whole and by timestep bin or timestep; called by all ranks together.

    Args:
        model: the whole or sharded model (not its DDP wrapper).
        batches: this rank's images with their conditions, indices and weights, as many on every rank; weight 0 is padding.
        count: held-out images in all.
        bin_edges: inner edges in t, rising, [K - 1].

    Returns:
        {"loss": mean of `LossTerms.weighted`, "loss_stderr": its standard error, "loss_by_bin/k": mean of bin k's plain error,
        "loss_stderr_by_bin/k": its standard error}; without the bins that have no image, and without the errors of
        those that have one. The errors are those of independent draws; timesteps are spread evenly, so the true
        ones are smaller. With `timesteps`, "by_time/k" of the k-th of them instead of "by_bin/k". Of an objective of two times
        also each of these over the images with equal times, "equal_times_loss", and over the others, "two_times_loss".
    """
    parts = ("", "equal_times_", "two_times_") if objective.config.two_times else ("",)
    means = {part: MeansByTime(bin_edges, timesteps, device) for part in parts}
    with evaluating(model):
        for batch in batches:
            batch = {name: value.to(device) for name, value in batch.items()}
            images, indices, weights = (batch[key] for key in ("images", "indices", "weights"))
            draw = held_out_draw(objective, seed, indices, count, images.shape[1:], timesteps)
            with compute_context(param_dtype, device, sharded):
                terms = objective.loss(model, Microbatch(images, model.condition_kind.of(batch), batch), draw)
            for part, of_part in means.items():
                inside = weights if part == "" else weights * _times(draw, part)
                of_part.add(indices, terms.t, inside, terms.error, terms.weighted)
    return {f"{part}{name}": value for part, of_part in means.items() for name, value in of_part.metrics().items()}


def _times(draw: Draw, part: str) -> Tensor:
    """Images of a part [B], 1 within and 0 beyond: of equal times, or of two."""
    two = torch.zeros_like(draw.t) if draw.duration is None else (draw.duration > 0).to(draw.t)
    return two if part == "two_times_" else 1.0 - two
