"""FLOPs of a network: its own formula, compared with torch's count of its matrix products.

MFU uses the formula; torch's count of every product in the forward, convolutions included, must agree with it.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from torchtitan.models.base import DiffusionModel


class MiscountedModel(Exception):
    """Network with a wrong formula for its own products, or another output than it declares; the message is one line."""


def counted_macs_per_image(model: DiffusionModel) -> int:
    """Count multiply-accumulates of one image's forward, by torch; the model is on the meta device."""
    return _counted_forward(model)[1]


def _counted_forward(model: DiffusionModel) -> tuple[Any, int]:
    """Output of one image's forward on the meta device, and its multiply-accumulates."""
    with FlopCounterMode(display=False) as counter:
        output = forward_on_meta(model, 1)
    return output, counter.get_total_flops() // 2


@torch.no_grad()
def forward_on_meta(model: DiffusionModel, images: int) -> Any:
    """Call the forward of a model on the meta device, where it computes nothing."""
    x, kind = torch.empty(images, *model.image_shape, device="meta"), model.condition_kind
    return model(x, torch.empty(images, device="meta"), kind.of(kind.placeholder(images, "meta")))


def check_macs(model: DiffusionModel, name: str) -> None:
    """Compare a network's formula with torch's count, and its output with what it declares. Raises MiscountedModel."""
    if not hasattr(model, "out_channels"):
        raise MiscountedModel(f"model.name = {name}: lacks the attribute out_channels (channels of its output)")
    output, counted = _counted_forward(model)
    wanted = [1, model.out_channels, *model.image_shape[1:]]
    found = list(output.shape) if isinstance(output, Tensor) else type(output).__name__
    if found != wanted:
        raise MiscountedModel(f"model.name = {name}: forward returns {found}, not a tensor [B, out_channels, H, W] = {wanted}")
    said = model.forward_macs_per_image(model.image_shape)
    if said != counted:
        raise MiscountedModel(
            f"model.name = {name}: forward_macs_per_image says {said:,} multiply-accumulates per image, torch counts "
            f"{counted:,}; every MFU would be wrong (count the missing products there, as docs/models.md shows)"
        )
