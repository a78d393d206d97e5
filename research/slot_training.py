"""Training of a model on some slots of timesteps alone, and the slots' gradients at its weights."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn

from research.equal_loss import equal_loss_edges, interpolate_loss
from research.offline_gradients import (
    Advance,
    GradientError,
    Gradients,
    TimestepBin,
    square_norm,
    timestep_bin,
)
from research.timestep_errors import TimestepNodes
from torchtitan.diffusion.objective import Objective
from torchtitan.diffusion.paths import IndexedPath, indexed
from torchtitan.distributed.parallelize import clip_gradients
from torchtitan.training.optimizer import OptimizerSet


@dataclass(frozen=True)
class Slot:
    """Slot of timesteps.

    Attributes:
        number: its place, from 1.
        low, high: it is [low, high).
        unit: of both, "index" or "t".
        where: the same, in quantiles of the training density.
    """

    number: int
    low: float
    high: float
    unit: str
    where: TimestepBin

    @property
    def range(self) -> str:
        """Range of its timesteps, as "5-12" (indices, both ends included) or "0.1-0.25" (t)."""
        if self.unit == "index" and float(self.low).is_integer() and float(self.high).is_integer():
            return f"{self.low:.0f}-{self.high - 1:.0f}"
        return f"{self.low:.6g}-{self.high:.6g}"


def make_slots(objective: Objective, edges: Sequence[float], unit: str) -> list[Slot]:
    """Make the slots between edges. Raises ValueError: one is empty, or training never visits it."""
    return [
        Slot(number, low, high, unit, timestep_bin(objective, low, high, unit))
        for number, (low, high) in enumerate(pairwise(edges), 1)
    ]


def slot_nodes(objective: Objective, where: TimestepBin, count: int) -> TimestepNodes:
    """Nodes of a slot: middles of `count` equal shares of its training samples, no index twice."""
    shares = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    t = objective.timestep_sampler.density.quantile(where.quantile_low + where.mass * shares)
    if not objective.path.discrete:
        return TimestepNodes(t)
    path = indexed(objective.path)
    index = path.t_to_index(t).unique()
    return TimestepNodes(path.index_to_t(index), index)


def curve_nodes(path: IndexedPath, count: int) -> TimestepNodes:
    """Nodes of a curve: at most `count` indices, equally spaced in ln(1 + index), the first and the last among them."""
    ends = torch.linspace(0.0, math.log(path.num_indices), count, dtype=torch.float64)
    index = (ends.exp() - 1.0).round().long().clamp(0, path.num_indices - 1).unique()
    return TimestepNodes(path.index_to_t(index), index)


def edges_of_curve(objective: Objective, nodes: TimestepNodes, errors: Tensor, num_slots: int) -> list[int]:
    """Edges of equal loss of a curve known at some indices, by `interpolate_loss` between them.

    Args:
        objective: on a discrete path. Indices that it does not train count as without loss.
        nodes: N of its indices, the first and the last among them.
        errors: mean error at each, positive, [N].
        num_slots: number of slots.

    Returns:
        edges [num_slots + 1] from 0 to T.

    Raises:
        ValueError: an error is not positive and finite, or there are too many slots.
    """
    path = indexed(objective.path)
    curve = interpolate_loss(cast(Tensor, nodes.index), errors, path.num_indices)
    ends = objective.timestep_sampler.density.quantile(torch.tensor([1e-12, 1.0 - 1e-12], dtype=torch.float64))
    first, last = path.t_to_index(ends).tolist()
    curve[:first] = 0.0
    curve[last + 1 :] = 0.0
    return equal_loss_edges(curve, num_slots)


@contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """Restore the weights afterwards, in eval mode without gradients."""
    kept = [parameter.detach().clone() for parameter in model.parameters()]
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), kept, strict=True):
                parameter.copy_(value)
        model.eval().requires_grad_(False)


def finetune(
    gradients: Gradients,
    optimizer: OptimizerSet,
    slots: Sequence[TimestepBin],
    *,
    steps: int,
    batch_size: int,
    stream: int,
    max_norm: float = 0.0,
    advance: Advance | None = None,
) -> None:
    """Fine-tune on the timesteps of some slots alone; the slots take turns within a batch.

    Sample n of a stream has the same image, noise and place within its slot whatever the slots are.

    Args:
        gradients: of the model in training.
        optimizer: of its parameters.
        slots: one or more.
        steps: optimizer steps, 0 or more.
        batch_size: samples of a step.
        stream: of samples, 0 <= stream < 2^24.
        max_norm: above which the gradient is scaled down; 0: no clipping.
        advance: called with the number of samples after some are done.

    Raises:
        GradientError: a gradient is not finite.
        DatasetError: an image could not be read.
    """
    for step in range(steps):
        numbers = torch.arange(step * batch_size, (step + 1) * batch_size)
        optimizer.zero_grad()
        for place, where in enumerate(slots):
            gradients.accumulate(where, stream, numbers[numbers % len(slots) == place], 1.0 / batch_size, advance)
        norm = math.sqrt(square_norm([parameter.grad for parameter in gradients.parameters]))
        if not math.isfinite(norm):
            raise GradientError(f"the gradient of step {step + 1} is not finite")
        if max_norm > 0:
            clip_gradients(gradients.parameters, torch.tensor(norm), max_norm)
        optimizer.step()
    optimizer.zero_grad()


def gradient_products(
    gradients: Gradients, slots: Sequence[tuple[TimestepBin, int]], numbers: Tensor, advance: Advance | None = None
) -> Tensor:
    """Products <G_i, G_j> of the slots' expected gradients G, unbiased, squared norms on the diagonal.

    Each slot's mean gradient is computed from two independent halves. A product of different slots takes all of both, a
    squared norm is the product of the two halves: noise that is independent adds nothing to either in expectation.

    Args:
        gradients: of the model.
        slots: K pairs of a slot and its stream of samples, all streams different.
        numbers: of the samples of each stream, [N]; N is even.
        advance: called with the number of samples after some are done.

    Returns:
        float64 [K, K], symmetric; a diagonal element may be negative.

    Raises:
        GradientError: a gradient is not finite.
        DatasetError: an image could not be read.
    """
    halves = [
        [gradients.mean_gradient(where, half, stream, advance) for half in numbers.chunk(2)] for where, stream in slots
    ]
    products = torch.empty(len(slots), len(slots), dtype=torch.float64)
    for i, (first, second) in enumerate(halves):
        products[i, i] = _dot(first, second)
        for j in range(i):
            products[i, j] = products[j, i] = 0.25 * sum(_dot(a, b) for a in (first, second) for b in halves[j])
    return products


def _dot(a: Tensor, b: Tensor) -> float:
    """Dot product in float64, a few million values at a time."""
    return sum((x.double() @ y.double()).item() for x, y in zip(a.split(1 << 22), b.split(1 << 22), strict=True))
