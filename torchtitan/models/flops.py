"""The matrix products of a network, counted by torch where the network says them by a formula.

The formula is what MFU is made of; a count of every product that the forward calls, convolutions included, must agree.
"""

import torch
from torch.utils.flop_counter import FlopCounterMode

from torchtitan.models.base import DiffusionModel


class MiscountedModel(Exception):
    """A network whose formula for its own products is wrong; the message is one line."""


def counted_macs_per_image(model: DiffusionModel) -> int:
    """Multiply-accumulates of one image's forward, as torch counts them.

    Args:
        model: on the meta device, where the forward computes nothing.
    """
    x = torch.empty(1, *model.image_shape, device="meta")
    condition = None if model.null_class is None else torch.empty(1, dtype=torch.int64, device="meta")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(x, torch.empty(1, device="meta"), condition)
    return counter.get_total_flops() // 2


def check_macs(model: DiffusionModel, name: str) -> None:
    """Compare a network's formula with torch's count.

    Args:
        model: on the meta device.
        name: of its family.

    Raises:
        MiscountedModel: they differ.
    """
    said, counted = model.forward_macs_per_image(model.image_shape), counted_macs_per_image(model)
    if said != counted:
        raise MiscountedModel(
            f"model.name = {name}: forward_macs_per_image says {said:,} multiply-accumulates per image, torch counts "
            f"{counted:,}; every MFU would be wrong (count the missing products there)"
        )
