"""Loss of a timestep bin around a checkpoint's weights."""

from collections.abc import Callable

import torch
from torch import Tensor

from research.offline_gradients import Gradients, TimestepBin


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
