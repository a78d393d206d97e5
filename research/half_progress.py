"""Progress of single steps on a timestep bin's loss, by batch size: step size tuned on some replicates, measured on others.

A replicate has held samples of its own, on which the loss is compared before and after every step, and one mean gradient of each
batch size. Replicates for tuning share no sample with those for evaluation, so that no step size is favoured by its own noise.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from research.offline_gradients import EstimateFailed, Gradients, TimestepBin

_MOST_FACTORS = 60  # of two, between the step size that tuning starts from and the best one


class BinLoss(Protocol):
    """Loss of a timestep bin around frozen weights. Samples are known by numbers; of each, everything random is fixed."""

    def gradient(self, numbers: Tensor, step: Tensor | None = None) -> Tensor:
        """Mean gradient of samples [N] at the frozen weights, or at these minus a step [P]; float32 [P]."""

    def held_loss(self, numbers: Tensor) -> Callable[[Tensor], float]:
        """Mean loss of samples [N] as a function of a step [P]: at the frozen weights minus the step."""


class WeightsLoss:
    """Loss of a timestep bin around a checkpoint's weights, which `restore` restores; a `BinLoss`."""

    def __init__(self, gradients: Gradients, where: TimestepBin, stream: int) -> None:
        """
        Args:
            gradients: of the model.
            where: the bin.
            stream: of samples, 0 <= stream < 2^24.
        """
        self._gradients, self._where, self._stream = gradients, where, stream
        self._frozen = torch.cat([parameter.detach().flatten() for parameter in gradients.parameters])
        self._moved = False

    def gradient(self, numbers: Tensor, step: Tensor | None = None) -> Tensor:
        self._move(step)
        return self._gradients.mean_gradient(self._where, numbers, self._stream)

    def held_loss(self, numbers: Tensor) -> Callable[[Tensor], float]:
        """Mean loss of samples [N] as a function of a step [P]: at the frozen weights minus the step."""
        present_losses = self._gradients.held_losses(self._where, numbers, self._stream)

        def loss_after(step: Tensor) -> float:
            self._move(step)
            return present_losses().mean().item()

        return loss_after

    def restore(self) -> None:
        self._move(None)

    @torch.no_grad()
    def _move(self, step: Tensor | None) -> None:
        """Move the weights to the frozen ones minus a step [P], from wherever they are; None: to the frozen ones."""
        if step is None and not self._moved:
            return
        weights = self._frozen if step is None else self._frozen - step
        parts = weights.split([parameter.numel() for parameter in self._gradients.parameters])
        for parameter, part in zip(self._gradients.parameters, parts, strict=True):
            parameter.copy_(part.view_as(parameter))
        self._moved = step is not None


class SampleNumbers:
    """Numbers of samples, each taken once."""

    def __init__(self) -> None:
        self._next = 0

    def take(self, count: int) -> Tensor:
        self._next += count
        return torch.arange(self._next - count, self._next)


class Replicate:
    """Held samples of a replicate, with their gradient and their loss at the frozen weights."""

    def __init__(self, loss: BinLoss, numbers: Tensor) -> None:
        self._loss, self._numbers = loss, numbers
        self.gradient = loss.gradient(numbers)
        self._loss_after = loss.held_loss(numbers)
        self.before = self._loss_after(torch.zeros_like(self.gradient))

    def slope(self, direction: Tensor) -> float:
        """Decrease of the held loss per step size, in first order."""
        return torch.dot(self.gradient, direction).item()

    def progress(self, direction: Tensor, step_size: float, expected_slope: float) -> float:
        """Decrease of the held loss by a step, with the linear part of its noise subtracted; minus infinity if not finite.

        The control variate, step size x (slope - expected slope), has mean zero over replicates whatever the loss. An error of
        the expected slope changes every progress by the same factor where the loss is quadratic.
        """
        decrease = self.before - self._loss_after(step_size * direction)
        corrected = decrease - step_size * (self.slope(direction) - expected_slope)
        return corrected if math.isfinite(corrected) else -math.inf

    def gradient_change(self, step: Tensor) -> Tensor:
        """Change of the held loss's gradient by a step, [P]."""
        return self._loss.gradient(self._numbers, step) - self.gradient


@dataclass(frozen=True)
class Progress:
    """Progress under an update geometry.

    Attributes:
        values: of each evaluation replicate for each batch size, and last for the full gradient, float64 [R, batches + 1].
        of_blocks: change of the full gradient's progress, in first order, if it were the mean gradient of one of its blocks;
            float64 [blocks], with a mean of about zero.
        step_sizes: tuned, in the same order.
    """

    values: Tensor
    of_blocks: Tensor
    step_sizes: list[float]


class UpdateGeometry:
    """Update geometry: steps along P g, P diagonal, with step sizes tuned from one batch size to the next."""

    def __init__(
        self, scale: Tensor, slope: float, tuning: Sequence[Replicate], evaluation: Sequence[Replicate], start: float
    ) -> None:
        """
        Args:
            scale: diagonal of P, [P].
            slope: G' P G of the bin's mean gradient G, from other samples than the replicates'.
            tuning, evaluation: replicates.
            start: step size that tuning starts from.

        Raises:
            EstimateFailed: the slope is not positive.
        """
        if not slope > 0:
            raise EstimateFailed("the mean gradient is not distinguished from zero (more samples needed)")
        self.tuning, self.evaluation, self.step_size = tuning, evaluation, start
        self._scale, self._slope = scale, slope

    def tune(self, gradients: Sequence[Tensor]) -> float:
        """Tune the step size of gradients, one per tuning replicate. Raises EstimateFailed."""

        def mean_progress(step_size: float) -> float:
            pairs = zip(self.tuning, gradients, strict=True)
            found = [one.progress(self._scale * gradient, step_size, self._slope) for one, gradient in pairs]
            return sum(found) / len(found)

        self.step_size = best_step_size(mean_progress, self.step_size)
        return self.step_size

    def evaluate(self, replicate: int, gradient: Tensor) -> float:
        """Progress of an evaluation replicate by a gradient, at the tuned step size."""
        return self.evaluation[replicate].progress(self._scale * gradient, self.step_size, self._slope)

    def of_blocks(self, full_gradient: Tensor, blocks: Sequence[Tensor]) -> Tensor:
        """First-order changes of the progress along the full gradient for each block's mean gradient in its place, [blocks].

        The linear part of the decrease is the control variate's, so the derivative along the direction d is the step size times
        the change of the held gradient by the step.
        """
        step = self.step_size * self._scale * full_gradient
        change = torch.zeros_like(step)
        for replicate in self.evaluation:
            change += replicate.gradient_change(step) / len(self.evaluation)
        change *= self.step_size * self._scale
        return torch.tensor([torch.dot(change, block - full_gradient).item() for block in blocks], dtype=torch.float64)


def best_step_size(progress: Callable[[float], float], start: float) -> float:
    """Step size of the most progress: by factors of two up to a maximum inside, then the vertex of a parabola.

    Args:
        progress: as a function of the step size; positive for small ones, minus infinity where a loss is not finite.
        start: first step size.

    Raises:
        EstimateFailed: there is none within 2^60 of the start.
    """
    values: dict[int, float] = {}

    def value(place: int) -> float:
        if place not in values:
            values[place] = progress(start * 2.0**place)
        return values[place]

    best = 0
    while abs(best) <= _MOST_FACTORS:
        if not value(best) > 0 or value(best - 1) > value(best):
            best -= 1
        elif value(best + 1) > value(best):
            best += 1
        else:
            return start * 2.0**best * _vertex(value(best - 1), value(best), value(best + 1))
    raise EstimateFailed("no step size of any order lowers the loss of the bin")


def _vertex(half: float, whole: float, double: float) -> float:
    """Place of the maximum of the parabola through values at 1/2, 1 and 2, the middle one being the largest."""
    if not math.isfinite(half + double):
        return 1.0
    rise, fall = (whole - half) / 0.5, (whole - double) / 1.0  # slopes at 3/4 and, negated, at 3/2
    return 0.75 * (1.0 + rise / (rise + fall)) if rise + fall > 0 else 1.0


def measure_progress(
    loss: BinLoss, geometries: Sequence[UpdateGeometry], blocks: Sequence[Tensor], batches: Sequence[int],
    numbers: SampleNumbers, advance: Callable[[int], None] = lambda amount: None,
) -> list[Progress]:  # fmt: skip
    """Measure the best progress of a step by batch size, for several update geometries with the same gradients.

    Args:
        loss: of the bin.
        geometries: with as many replicates each.
        blocks: mean gradients of equally many samples, [P] each, whose mean is the full gradient.
        batches: sizes, rising.
        numbers: of the samples of the batches.
        advance: called with the number of samples after each gradient of a batch.

    Raises:
        EstimateFailed: no step size lowers the loss, or the loss is not finite.
    """
    full = torch.stack(list(blocks)).mean(0)
    tuned, evaluated = len(geometries[0].tuning), len(geometries[0].evaluation)
    values = torch.zeros(len(geometries), evaluated, len(batches) + 1, dtype=torch.float64)
    step_sizes = [[0.0] * (len(batches) + 1) for _ in geometries]
    of_blocks = []

    def measure(column: int, gradient: Callable[[], Tensor]) -> None:
        for_tuning = [gradient() for _ in range(tuned)]
        for number, geometry in enumerate(geometries):
            step_sizes[number][column] = geometry.tune(for_tuning)
        del for_tuning
        for place in range(evaluated):
            for_evaluation = gradient()
            for number, geometry in enumerate(geometries):
                values[number, place, column] = geometry.evaluate(place, for_evaluation)
        if not values[:, :, column].isfinite().all():
            raise EstimateFailed("the loss is not finite after a step of the tuned size")

    measure(len(batches), lambda: full)
    for geometry in geometries:
        of_blocks.append(geometry.of_blocks(full, blocks))
    # From the full gradient down: the best step size changes little from one batch size to the next.
    for column, batch in reversed(list(enumerate(batches))):

        def drawn(batch: int = batch) -> Tensor:
            gradient = loss.gradient(numbers.take(batch))
            advance(batch)
            return gradient

        measure(column, drawn)
    return [Progress(*found) for found in zip(values, of_blocks, step_sizes, strict=True)]
