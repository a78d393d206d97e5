"""Constant tables on the devices where they are used: a copy from the host at each use would wait for the device."""

import torch
from torch import Tensor


class DeviceTables:
    """Constant tensors that are copied once to each device."""

    def __init__(self, *tables: Tensor) -> None:
        self._on = {tables[0].device: tables}

    def on(self, device: torch.device) -> tuple[Tensor, ...]:
        """Tables on a device, in the order in which they were given."""
        if device not in self._on:
            self._on[device] = tuple(table.to(device) for table in next(iter(self._on.values())))
        return self._on[device]
