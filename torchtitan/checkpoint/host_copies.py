"""Copies of a training state in host memory, taken between two steps so that training can continue during the write."""

import dataclasses

import torch
from torch import Tensor

from torchtitan.files.shard_files import Piece


class HostCopies:
    """Buffers in host memory, one per piece, used again by every copy.

    Copies to pinned memory are queued on the device's current stream, before later changes, and not waited for.
    """

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self._buffers: dict[str, Tensor] = {}
        self._copied: torch.cuda.Event | None = None

    def take(self, pieces: list[Piece]) -> list[Piece]:
        """Take copies of the pieces' present values; not to be read before `wait`, nor after the next `take`."""
        self._buffers = {piece.name: self._buffer(piece) for piece in pieces}
        for piece in pieces:
            self._buffers[piece.name].copy_(piece.local, non_blocking=self._pinned)
        if self._pinned:
            self._copied = torch.cuda.Event()
            self._copied.record()
        return [dataclasses.replace(piece, local=self._buffers[piece.name]) for piece in pieces]

    def wait(self) -> None:
        """Wait until the copies are complete; from any thread."""
        if self._copied is not None:
            self._copied.synchronize()

    def _buffer(self, piece: Piece) -> Tensor:
        buffer, local = self._buffers.get(piece.name), piece.local
        if buffer is not None and (buffer.shape, buffer.dtype) == (local.shape, local.dtype):
            return buffer
        return torch.empty(local.shape, dtype=local.dtype, pin_memory=self._pinned)
