"""Effect of training on one timestep bin on the losses of all: first-order prediction and measured changes.

To first order, a step of size eta on bin b along P changes the loss of bin c by -eta G_c'P G_b, G the mean gradients.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from torchtitan.evaluation.offline_gradients import GradientError
from torchtitan_dit.studies.block_products import BlockProducts, block_products

BLOCKS = 8  # of the samples of a mean gradient
SMALL = 0.1  # of a training step: the small move


class HeldLoss(Protocol):
    """Loss of a timestep bin around frozen weights. Samples are known by numbers; of each, everything random is fixed."""

    def gradient(self, numbers: Tensor, step: Tensor | None = None) -> Tensor:
        """Mean gradient of samples [N] at the frozen weights, or at these minus a step [P]; float32 [P]."""

    def held_losses(self, numbers: Tensor) -> Callable[[Tensor], Tensor]:
        """Losses of samples [N] as a function of a step [P]: at the frozen weights minus the step; float64 [N]."""


@dataclass(frozen=True)
class FrozenBins:
    """Bins of a checkpoint: their gradients' products, and held samples with their losses.

    Attributes:
        losses: of the K bins.
        means: mean gradients, [K, P].
        products: name of the update -> products of the mean gradients in its geometry, [K, K].
        before: losses of the held samples at the frozen weights, float64 [K, N].
        after: losses of the held samples of each bin as a function of a step [P].
        used: number of samples of each bin that are taken; those of steps follow.
    """

    losses: Sequence[HeldLoss]
    means: Tensor
    products: Mapping[str, BlockProducts]
    before: Tensor
    after: Sequence[Callable[[Tensor], Tensor]]
    used: int


def measure_bins(
    losses: Sequence[HeldLoss], scales: Mapping[str, Tensor | None], samples: int, held: int,
    advance: Callable[[int], None] = lambda amount: None,
) -> FrozenBins:  # fmt: skip
    """Measure the bins of a checkpoint.

    Args:
        losses: of the K bins; the samples of each are independent of the others'.
        scales: name of the update -> diagonal of P, [P]; None: the identity.
        samples: of each mean gradient, a multiple of BLOCKS.
        held: further samples of each bin, on which changes of its loss are measured.
        advance: called with the number of samples after some are done.

    Raises:
        GradientError: a gradient is not finite.
        DatasetError: an image could not be read.
    """
    blocks = []
    for loss in losses:
        of_bin = []
        for numbers in torch.arange(samples).chunk(BLOCKS):
            of_bin.append(loss.gradient(numbers))
            advance(len(numbers))
        blocks.append(torch.stack(of_bin))
    stacked = torch.stack(blocks)  # [K, BLOCKS, P]
    products = {name: block_products(stacked, scale) for name, scale in scales.items()}
    after = [loss.held_losses(torch.arange(samples, samples + held)) for loss in losses]
    nothing = torch.zeros_like(stacked[0, 0])
    before = torch.stack([losses_after(nothing) for losses_after in after])
    return FrozenBins(losses, stacked.mean(1), products, before, after, samples + held)


@dataclass(frozen=True)
class Change:
    """Change of the bins' losses by a move.

    Attributes:
        values: mean changes over the held samples, float64 [K]; NaN if the move diverged.
        errors: their standard errors over samples, [K].
        along: first-order changes -G_c'd by the displacement d of the weights, [K].
    """

    values: Tensor
    errors: Tensor
    along: Tensor


def change_of(bins: FrozenBins, step: Tensor) -> Change:
    """Change of the bins' losses by a step [P], which is subtracted from the weights; not finite where a loss is not."""
    changes = torch.stack([losses_after(step) for losses_after in bins.after]) - bins.before
    errors = changes.std(1) / changes.shape[1] ** 0.5
    return Change(changes.mean(1), errors, -(bins.means.double() @ step.double()))


def measure_moves(
    bins: FrozenBins, trained: int, scale: Tensor | None, step_size: float, batch: int, several: int, several_batch: int,
    advance: Callable[[int], None] = lambda amount: None,
) -> dict[str, Change]:  # fmt: skip
    """Measure the changes of all bins' losses by training on one alone: by SMALL of a step, a step, several steps.

    Args:
        bins: of a checkpoint.
        trained: number of the bin.
        scale: diagonal of P, [P]; None: the identity.
        step_size: of a training step.
        batch: samples of the first two moves, which take the same step but for its size.
        several: number of consecutive steps of the third.
        several_batch: new samples of each of these.
        advance: called with the number of samples after some are done.

    Raises:
        GradientError: the gradient of the first step is not finite.
        DatasetError: an image could not be read.
    """
    loss, first = bins.losses[trained], bins.used

    def step(gradient: Tensor) -> Tensor:
        return step_size * (gradient if scale is None else scale * gradient)

    whole = step(loss.gradient(torch.arange(first, first + batch)))
    advance(batch)
    found = {"small": change_of(bins, SMALL * whole), "whole": change_of(bins, whole)}
    first, moved = first + batch, torch.zeros_like(whole)
    for _ in range(several):
        try:
            moved += step(loss.gradient(torch.arange(first, first + several_batch), moved))
        except GradientError:  # the move diverged, which is an answer
            return found | {"several": change_of(bins, torch.full_like(whole, torch.nan))}
        first += several_batch
        advance(several_batch)
    return found | {"several": change_of(bins, moved)}
