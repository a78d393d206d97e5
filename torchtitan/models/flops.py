"""FLOPs of a network: its own formula, compared with torch's count of its matrix products.

MFU uses the formula; torch's count of every product in the forward, convolutions included, must agree with it.
"""

import torch
from torch.utils.flop_counter import FlopCounterMode

from torchtitan.models.base import DiffusionModel


class MiscountedModel(Exception):
    """Network with a wrong formula for its own products; the message is one line."""


def counted_macs_per_image(model: DiffusionModel) -> int:
    """Count multiply-accumulates of one image's forward, by torch; the model is on the meta device."""
    with FlopCounterMode(display=False) as counter:
        forward_on_meta(model, 1)
    return counter.get_total_flops() // 2


@torch.no_grad()
def forward_on_meta(model: DiffusionModel, images: int) -> None:
    """Call the forward of a model on the meta device, where it computes nothing."""
    x, kind = torch.empty(images, *model.image_shape, device="meta"), model.condition_kind
    model(x, torch.empty(images, device="meta"), kind.of(kind.placeholder(images, "meta")))


def check_macs(model: DiffusionModel, name: str) -> None:
    """Compare a network's formula with torch's count. Raises MiscountedModel: they differ."""
    said, counted = model.forward_macs_per_image(model.image_shape), counted_macs_per_image(model)
    if said != counted:
        raise MiscountedModel(
            f"model.name = {name}: forward_macs_per_image says {said:,} multiply-accumulates per image, torch counts "
            f"{counted:,}; every MFU would be wrong (count the missing products there, as docs/models.md shows)"
        )
