"""Sums of steps on their way from the device to the host, which reads them without waiting for the device."""

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from torchtitan.gns.capture import StepSums

_FIELDS = tuple(field.name for field in fields(StepSums))


class LateSums:
    """Queue of steps: they wait on the device, are sent to the host in one copy, and are taken there later."""

    def __init__(self) -> None:
        self._waiting: list[tuple[int, dict[str, torch.Size], Tensor]] = []
        self._sent: list[tuple[int, dict[str, torch.Size], int]] = []  # and the length of its row
        self._copy: Tensor | None = None
        self._arrival: torch.cuda.Event | None = None

    def add(self, step: int, sums: StepSums, skip: Tensor) -> None:
        """Add a step's sums, on the device, and whether the step was skipped, bool scalar."""
        found = {name: value for name in _FIELDS if (value := getattr(sums, name)) is not None}
        row = torch.cat([skip.to(torch.float64)[None], *(value.flatten() for value in found.values())])
        self._waiting.append((step, {name: value.shape for name, value in found.items()}, row))

    def send(self) -> None:
        """Send the steps that wait to the host, which does not wait for them; those sent before must have been taken."""
        assert not self._sent, "sent twice without a take"
        if not self._waiting:
            return
        rows = torch.cat([row for _, _, row in self._waiting])
        self._sent = [(step, shapes, len(row)) for step, shapes, row in self._waiting]
        self._waiting = []
        self._copy, self._arrival = rows, None
        if rows.device.type == "cuda":
            self._copy = rows.to("cpu", non_blocking=True)  # into pinned memory
            self._arrival = torch.cuda.Event()
            self._arrival.record()

    def take(self) -> list[tuple[int, StepSums]]:
        """Take what was sent, in order and without skipped steps; waits for that copy, not for later work."""
        sent, self._sent = self._sent, []
        if not sent:
            return []
        if self._arrival is not None:
            self._arrival.synchronize()
        assert self._copy is not None
        rows = self._copy.split([length for _, _, length in sent])
        self._copy = self._arrival = None
        return [(step, _unpacked(row[1:], shapes)) for (step, shapes, _), row in zip(sent, rows, strict=True) if not row[0]]

    def clear(self) -> None:
        """Drop everything."""
        self._waiting, self._sent, self._copy, self._arrival = [], [], None, None


def _unpacked(row: Tensor, shapes: dict[str, torch.Size]) -> StepSums:
    values: dict[str, Any] = {}
    parts = row.split([shape.numel() for shape in shapes.values()])
    for (name, shape), part in zip(shapes.items(), parts, strict=True):
        values[name] = part.view(shape)
    return StepSums(**values)
