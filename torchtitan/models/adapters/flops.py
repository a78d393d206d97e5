"""Floating-point operations of training a network with adapters."""

import math
from typing import cast

from torch import Tensor

from torchtitan.models.adapters.adapters import TRAINED
from torchtitan.models.adapters.layers import AdaptedLayer, AdaptedLinear, LowRank
from torchtitan.models.base import DiffusionModel


def training_flops(
    model: DiffusionModel, image_shape: tuple[int, int, int], untrained_forwards: int = 0, steps: int | None = None
) -> int:
    """Count floating-point operations of training on one image, of which MFU is a share.

    Without adapters they are `DiffusionModel.flops_per_image`. With them a frozen weight has one product in the backward,
    for the gradient of its input; a weight that trains has two:

        frozen linear                    2 + 2 per multiply-accumulate of the forward
        A and B of a trained adapter     2 + 4
        A and B of a frozen adapter      2 + 2, where its multiple in training is not 0
        layer with adapters of its raw weight (convolutions)  2 + 4: the sum has the gradient of a whole weight
        attention                        2 + 4: of its two factors both have gradients

    Recomputation is not counted. The inputs' gradients of the few layers before the first adapter are, though they are not
    computed: at most a thousandth of the total in Flux.

    Args:
        untrained_forwards: forwards without backward, as `Objective.untrained_forwards` of the run.
        steps: of the run, for a network without adapters.
    """
    layers = {name: model.get_submodule(name) for name in model.applications(image_shape)}
    if not any(isinstance(layer, AdaptedLayer) for layer in layers.values()):
        return model.flops_per_image(image_shape, untrained_forwards, steps)
    forward = 1 + untrained_forwards
    total = (forward + 2) * model.attention_macs(model.tokens_per_image(image_shape))
    for name, times in model.applications(image_shape).items():
        layer, backward = layers[name], 1
        if isinstance(layer, AdaptedLinear):
            total += times * sum((forward + (2 if trains else 1)) * macs for macs, trains in _adapters(layer))
        elif isinstance(layer, AdaptedLayer) and TRAINED in layer.adapters:
            backward = 2
        total += (forward + backward) * times * math.prod(cast(Tensor, layer.weight).shape)
    return 2 * total


def _adapters(layer: AdaptedLinear) -> list[tuple[int, bool]]:
    """Multiply-accumulates of each update that counts in training, per input, and whether it trains."""
    return [
        (update.down.numel() + update.up.numel(), name == TRAINED)
        for name, updates in layer.adapters.items()
        for update in cast(list[LowRank], updates)
        if name == TRAINED or update.training_weight
    ]
