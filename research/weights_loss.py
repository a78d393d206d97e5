"""Loss of a timestep bin around a checkpoint's weights."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from research.offline_gradients import Gradients, TimestepBin


class MovedWeights:
    """Weights of a model that are moved from those it has now, and given back."""

    def __init__(self, gradients: Gradients) -> None:
        self._parameters = gradients.parameters
        self._frozen = flat_weights(self._parameters)
        self._moved = False

    def move(self, step: Tensor | None) -> None:
        """Move the weights to the frozen ones minus a step [P], from wherever they are; None: to the frozen ones."""
        if step is None and not self._moved:
            return
        self.put(self._frozen if step is None else self._frozen - step)
        self._moved = step is not None

    @torch.no_grad()
    def put(self, weights: Tensor) -> None:
        """Put other weights [P] into the model."""
        self._moved = True
        parts = weights.split([parameter.numel() for parameter in self._parameters])
        for parameter, part in zip(self._parameters, parts, strict=True):
            parameter.copy_(part.view_as(parameter))


def flat_weights(parameters: Sequence[Tensor]) -> Tensor:
    """Copy the weights into one vector, [P]."""
    return torch.cat([parameter.detach().flatten() for parameter in parameters])


class WeightsLoss:
    """Loss of a timestep bin around a checkpoint's weights, which `restore` gives back; a `BinLoss`."""

    def __init__(
        self, gradients: Gradients, where: TimestepBin, stream: int, weights: MovedWeights | None = None
    ) -> None:
        """
        Args:
            gradients: of the model.
            where: the bin.
            stream: of samples, 0 <= stream < 2^24.
            weights: of the model; needed where several losses move the same ones.
        """
        self._gradients, self._where, self._stream = gradients, where, stream
        self._weights = MovedWeights(gradients) if weights is None else weights

    def gradient(self, numbers: Tensor, step: Tensor | None = None) -> Tensor:
        self._weights.move(step)
        return self._gradients.mean_gradient(self._where, numbers, self._stream)

    def held_losses(self, numbers: Tensor) -> Callable[[Tensor], Tensor]:
        """Losses of samples [N] as a function of a step [P], float64 [N]: at the frozen weights minus the step."""
        present_losses = self._gradients.held_losses(self._where, numbers, self._stream)

        def losses_after(step: Tensor) -> Tensor:
            self._weights.move(step)
            return present_losses()

        return losses_after

    def held_loss(self, numbers: Tensor) -> Callable[[Tensor], float]:
        losses_after = self.held_losses(numbers)
        return lambda step: losses_after(step).mean().item()

    def restore(self) -> None:
        self._weights.move(None)
